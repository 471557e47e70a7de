"""A clock for tests of what takes time."""


class Ticking:
    """A clock on which waiting is all that takes time."""

    def __init__(self) -> None:
        self.time = 5.0

    def now(self):
        return self.time

    def wait(self, news, seconds):
        self.time += seconds
