"""Serve a trained policy to robots; openpi's websocket clients work without changes.

    python -m tools.serve --checkpoint runs/mine
    python -m tools.serve --checkpoint runs/mine --record recordings/monday
    python -m tools.serve --replay datasets/mine --episode 3

Requests that arrive at about the same time share one batch. Clients that connect while the policy
is loaded and compiled wait for it. After SIGTERM or Ctrl-C, the server answers the requests that
have arrived and accepts no new clients.
"""

import asyncio
import ipaddress
import logging
import os
import signal
import ssl
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from models import Policy
from models.files.terminal import Console, Progress, guard_tracebacks, harmless, logger, say
from models.flow.realtime_chunking import Chunking
from parallel.hosts import exits
from tools.command_line.options import cli, current_options, with_value
from tools.recipes.policy import LIGHTER, LoadConfig
from tools.serving.engine import Engine
from tools.serving.limits import Limits
from tools.serving.listener import reserve_descriptors
from tools.serving.metrics import Metrics
from tools.serving.programs import keep_compiled, with_programs
from tools.serving.recorder import recorded, recording
from tools.serving.replay import open_replay
from tools.serving.server import Answers, PolicyServer, Report
from tools.serving.startup import go_on, is_preparing
from tools.serving.token import read_token

_NOISE = {
    "opening handshake failed",
    "socket.send() raised exception.",
    "SSL connection is closed",
}
"""Messages that are logged whenever a client vanishes; a client can cause thousands on purpose."""


@dataclass(frozen=True)
class ServeConfig(LoadConfig):
    """Policy, address and limits of a server."""

    checkpoint: Path | None = None
    """Run directory or one of its checkpoints; openpi's and LeRobot's checkpoints are read too."""
    replay: str | None = None
    """Dataset to play back instead of a checkpoint: the recorded actions of one of its episodes."""
    episode: int = 0
    """Episode to play back."""
    replay_steps: int = 10
    """Steps per chunk in playback: as many as the client acts before its next request."""
    record: Path | None = None
    """Folder for a LeRobot dataset of requests and answers."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines connect."""
    port: int = 8000
    """Port to listen on; 0 takes any free one."""
    token_file: Path | None = None
    """File whose only line clients must present as a bearer token (openpi's `api_key`)."""
    certificate: Path | None = None
    """PEM file with a certificate chain, to speak TLS (wss://)."""
    private_key: Path | None = None
    """PEM file with the certificate's key, if it is not in the same file."""
    inputs: tuple[str, ...] = ()
    """Names that clients use, as KEY=CAMERA or KEY=state; default: the policy's own."""
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Batch sizes to compile: the first before the first answer, the others in the
    background."""
    whole_start: bool = False
    """Compile all batches before the first answer."""
    programs: Path | None = None
    """Folder of traced programs, such as one that came with the checkpoint (the server runs them)
    or one to go with it; default: the user's cache."""
    deadline: float = 0.01
    """Longest time that a request waits for others to share its batch, in seconds."""
    longest_prompt: int | None = None
    """Longest prompt in tokens; longer ones are refused. Fewer lengths need compiling at start."""
    chunking: Chunking = "none"
    """Real-time chunking: clients may say how much of their last chunk is acted, and the answer
    continues that chunk, drawn by guidance (guided) or as the policy was trained to (trained).
    Compiles twice as much at start."""
    limits: Limits = field(default_factory=Limits)


def load(config: ServeConfig) -> Policy:
    """The policy to serve.

    Raises:
      ValueError, FileNotFoundError: as `load_policy`, or `longest_prompt` is not one that the
        policy can read.
    """
    if config.checkpoint is None:
        raise ValueError("There is no policy to load; give --checkpoint.")
    policy = config.load(config.checkpoint)
    if policy.processor is not None and config.longest_prompt is not None:
        limit = policy.processor.text_limit
        if not 1 <= config.longest_prompt <= limit:
            raise ValueError(
                f"longest_prompt is {config.longest_prompt}; this policy reads 1 to {limit} tokens."
            )
        shorter = policy.processor.with_limit(config.longest_prompt)
        policy = replace(policy, processor=shorter)
    return replace(policy, sizes=config.sizes)


def run(config: ServeConfig, console: Console) -> int:
    """Serves until SIGTERM or SIGINT; returns how many clients were cut off then.

    Raises:
      ValueError, OSError: the checkpoint, token, certificate or address cannot be used.
    """
    if (config.checkpoint is None) == (config.replay is None):
        raise ValueError("Give either --checkpoint, or --replay with a dataset.")
    if not 0 <= config.port < 2**16:
        raise ValueError(
            f"--port is {config.port}; give a port from 0 (any that is free) to 65535."
        )
    token, tls = read_token(config.token_file), _tls(config)
    reserve_descriptors(config.limits)
    for line in exposed(config):
        console.print(line)
    metrics = Metrics()
    server = PolicyServer(None, config.limits, token, metrics)
    with ExitStack() as opened:
        recorder = None
        if config.record is not None:
            recorder = opened.enter_context(recording(config.record, server, console))

        def prepare(report: Report) -> Answers:
            if config.replay is not None:
                replay = open_replay(
                    config.replay, config.episode, config.replay_steps, config.inputs
                )
                return recorded(replay, replay.inputs, recorder)
            keep_compiled()
            engine = opened.enter_context(_engine(config, metrics))
            with Progress(console=console, transient=True) as progress:
                bar = progress.bar("Compiling")

                def show(done: int, of: int) -> None:
                    bar(done, of)
                    report(done, of)

                (engine.warm if config.whole_start else engine.start)(show)
            if not config.whole_start:
                go_on(engine.warm)
            return recorded(engine, engine.inputs, recorder)

        return asyncio.run(_serve(server, prepare, config, tls, console))


def exposed(config: ServeConfig) -> list[str]:
    """Warnings about what others could read or use on such a server, one sentence each."""
    said = []
    for file in filter(None, (config.token_file, config.private_key)):
        mode = file.stat().st_mode & 0o777
        if mode & 0o077:
            said.append(
                f"{file} is accessible to other users (mode {mode:03o}); run: chmod 600 {file}"
            )
    if _is_loopback(config.host):
        return said
    if config.token_file is None:
        said.append("Without --token-file, anyone who can reach this address can use the policy.")
    if config.certificate is None:
        sent = "images and actions" if config.token_file is None else "the token and images"
        said.append(f"Without --certificate, {sent} cross the network unencrypted.")
    return said


def _engine(config: ServeConfig, metrics: Metrics) -> Engine:
    policy = load(config)
    if config.chunking not in ("none", policy.continues):
        policy = replace(policy, chunking=config.chunking)
    return Engine(
        with_programs(policy, config.programs),
        metrics,
        deadline=config.deadline,
        capacity=config.limits.clients,
        pairs=config.inputs,
        chunking=config.chunking,
        state_range=config.limits.state_range,
    )


async def _serve(
    server: PolicyServer,
    prepare: Callable[[Report], Answers],
    config: ServeConfig,
    tls: ssl.SSLContext | None,
    console: Console,
) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    at = f"{'ws' if tls is None else 'wss'}://{config.host}"
    return await server.run(
        *(config.host, config.port, stop),
        tls=tls,
        listening=lambda port: console.print(
            f"Listening on {at}:{port}; clients wait until it is ready."
        ),
        prepare=prepare,
        ready=lambda port, answers: say(console, f"Serving on {at}:{port}; {told(answers)}."),
    )


def told(answers: Answers) -> str:
    """Inputs and answers of a server, in words."""
    sent = [
        f"{key} ({' '.join([kind['dtype'], *([str(kind['shape'])] if 'shape' in kind else [])])})"
        for key, kind in answers.metadata["inputs"].items()
    ]
    shape = answers.metadata["actions"]["shape"]
    return f"clients send {', '.join(sent)} and get actions {shape}".replace("'", "")


def _tls(config: ServeConfig) -> ssl.SSLContext | None:
    if config.certificate is None:
        if config.private_key is not None:
            raise ValueError(
                "--private-key is given without --certificate; give the certificate that "
                "belongs to it."
            )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.certificate, config.private_key)
    except ssl.SSLError as error:
        raise ValueError(f"{config.certificate} and its key cannot be used: {error}.") from None
    return context


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def silence_vanished() -> None:
    """Keeps the log free of lines that only say that a client has vanished, and of control
    characters."""
    for name in ("websockets.server", "asyncio"):
        logger(name).addFilter(lambda record: record.msg not in _NOISE)


def main() -> None:
    """Command line; exits 0 unless a client was cut off."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    silence_vanished()
    try:
        given = with_value(sys.argv[1:], "--chunking", "guided")
        arguments = current_options(given, ServeConfig, steps="euler_steps")
        config = cli(ServeConfig, args=arguments, prog="python -m tools.serve", description=__doc__)
        size = f"the policy answers batches of up to {max(config.sizes, default=1)} requests"
        with exits.in_memory(size, ("smaller batches (--sizes)", *LIGHTER)):
            cut_off = run(config, Console())
    except (ValueError, OSError, exits.OutOfMemory) as error:
        sys.exit(harmless(f"error: {error}"))
    if is_preparing():
        sys.stdout.flush()
        os._exit(1 if cut_off else 0)
    sys.exit(1 if cut_off else 0)


if __name__ == "__main__":
    guard_tracebacks()
    main()
