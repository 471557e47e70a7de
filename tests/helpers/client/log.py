"""A recorder that keeps a loop's commands in memory."""


class CommandLog:
    def __init__(self):
        self.commands = []

    def begin(self, hz, prompt):
        pass

    def add(self, seen, command, seconds):
        self.commands.append(command)

    def end(self):
        pass

    def until(self, mode, count):
        """Yields False until so many commands in a row were of this mode, from now on."""
        first = len(self.commands)
        while [c.mode for c in self.commands[first:]][-count:] != [mode] * count:
            yield False
