"""The control loop's bookkeeping on a clock of the test's: each tick has one command, no action is
sent at another tick than its own or past its age, and what a server that is slow, gone or wrong
does to the robot is that it is held."""

from itertools import pairwise

import numpy as np
import pytest

from chiliad_client import ControlLoop, LoopSettings, SafetyLimits, ServerAnswer
from tests.helpers.client.fakes import DIMS, FakeClock, FakeRobot, FakeServer

HZ = 10


class Numbered:
    """Chunks that tell whose they are: (request, step) in hundredths."""

    def __init__(self, steps=12):
        self.steps, self.count = steps, 0

    def __call__(self, message):
        self.count += 1
        steps = np.arange(self.steps)
        return np.stack([np.full(self.steps, self.count), steps], 1) / 100


def made(delay=0.0, chunk=None, limits=None, chunking=True, stop=None, robot=None, **settings):
    clock = FakeClock()
    robot = robot or FakeRobot(clock)
    robot.clock = clock
    server = FakeServer(clock, chunk or Numbered(), delay, chunking)
    loop = ControlLoop(
        *(robot, server, "push", LoopSettings(HZ, **settings)),
        *(limits or SafetyLimits(), stop),
        clock=clock,
    )
    return loop, robot, server, clock


def steps(loop, count):
    return [loop.step() for _ in range(count)]


def test_every_tick_has_exactly_one_command():
    loop, robot, _, clock = made(delay=0.25)
    began = clock.time
    report = loop.run(seconds=6)
    assert len(robot.sent) == 61  # and one more that holds it
    ticks = [round((time - began) * HZ) for time, _ in robot.sent]
    assert ticks == list(range(61))
    assert report.missed == 0
    assert sum(report.ticks.values()) == 61


def test_a_slow_robot_misses_ticks_and_gets_no_two_commands_in_one():
    loop, robot, _, clock = made(delay=0.05)
    robot.slow = {20: 0.35, 40: 0.12}
    began = clock.time
    report = loop.run(seconds=6)
    ticks = [int((time - began) * HZ + 1e-6) for time, _ in robot.sent]
    assert len(set(ticks)) == len(ticks)
    assert report.missed == 61 - len(ticks) == 4


def test_a_late_tick_takes_the_action_of_the_time_that_it_is():
    loop, robot, _, _ = made(replan=100, chunk=Numbered(60))
    robot.slow = {20: 0.35}
    commands = steps(loop, 30)
    acted = [(c.tick, round(100 * c.sent[1])) for c in commands if c.mode == "act"]
    assert {tick - step for tick, step in acted} == {1}
    assert {20, 21, 22} & {tick for tick, _ in acted} == set()


def test_a_chunk_is_continued_at_its_tick_without_a_seam():
    """The server's chunk 2 begins with the promised steps of chunk 1, and so on: put in a row, the
    commands are chunk 1 up to the end of what was promised, then chunk 2 from there."""
    loop, _, server, clock = made(delay=0.25, replan=5)
    began = clock.time
    commands = steps(loop, 60)
    assert [c.mode for c in commands] == ["hold"] * 3 + ["act"] * 57
    asked = [round((time - began) * HZ) for time, _ in server.messages]
    starts = [3, *asked[1:]]
    assert [m["committed"] for _, m in server.messages[1:]] == [3] * (len(starts) - 1)
    assert [m["executed"] for _, m in server.messages[1:]] == list(np.diff(starts))
    switches = [3, *(start + 3 for start in starts[1:])]
    for number, (start, (first, after)) in enumerate(zip(starts, pairwise(switches), strict=False)):
        for c in commands[first:after]:
            np.testing.assert_allclose(c.sent, [(number + 1) / 100, (c.tick - start) / 100])
    assert set(loop.report.delays) == {3}
    assert loop.report.late == loop.report.expired == 0


def test_under_any_delays_the_server_continues_what_the_robot_acts_on():
    """FakeServer fails the test where the client speaks of a chunk that it has not, or of more
    steps than it has; what was promised is what is then sent."""
    rng = np.random.default_rng(1)
    delays = rng.uniform(0.0, 0.45, 200)
    loop, _, server, clock = made(delay=lambda n: delays[n % 200], chunk=Numbered(16), replan=4)
    began, commands, promised = clock.time, [], {}
    for _ in range(300):
        commands.append(loop.step())
        time, message = server.messages[-1]
        if "executed" in message:
            tick = round((time - began) * HZ)
            left = server.last[: message["committed"]]
            promised.update({tick + i: action for i, action in enumerate(left)})
    acted = [c for c in commands if c.mode == "act"]
    assert len(acted) > 280
    assert all(0 < c.age < 16 for c in acted)
    kept = [c for c in acted if c.tick in promised]
    assert len(kept) > 100
    for c in kept:
        np.testing.assert_array_equal(c.planned, promised[c.tick])


def test_delays_are_counted_in_steps_and_the_largest_is_committed():
    slow = {3: 0.45}
    loop, _, server, _ = made(delay=lambda n: slow.get(n, 0.15), chunk=Numbered(30), replan=6)
    steps(loop, 80)
    assert max(loop.report.delays) == 5
    committed = [m["committed"] for _, m in server.messages[1:]]
    assert committed[:2] == [2, 2]
    assert set(committed[3:8]) == {5}
    assert loop.report.late == 1


def test_the_first_chunk_is_acted_from_its_first_step_however_long_it_took():
    loop, _, _, _ = made(delay=0.75, chunk=Numbered(20))
    commands = steps(loop, 12)
    assert [c.mode for c in commands] == ["hold"] * 8 + ["act"] * 4
    assert [round(100 * c.sent[1]) for c in commands[8:]] == [0, 1, 2, 3]
    assert commands[8].age == 8


def test_ticks_that_are_missed_while_the_robot_is_held_cost_no_step_of_the_chunk():
    loop, _, _, clock = made(delay=0.75, chunk=Numbered(20))
    commands = steps(loop, 3)
    clock.time += 0.3
    commands += steps(loop, 8)
    acted = [c for c in commands if c.mode == "act"]
    assert [c.tick for c in commands[:5]] == [0, 1, 2, 5, 6]
    assert acted[0].tick == 8
    assert [round(100 * c.sent[1]) for c in acted] == list(range(len(acted)))


def test_a_short_chunk_is_followed_in_time_however_long_it_was_to_be_acted():
    loop, _, _, _ = made(delay=0.25, chunk=Numbered(10), replan=9)
    assert {c.mode for c in steps(loop, 80)[3:]} == {"act"}


def test_an_answer_to_another_question_is_none_of_this_one():
    loop, _, server, _ = made(delay=0.25, chunk=Numbered(30))
    steps(loop, 1)
    strange = np.full((30, DIMS), 9, np.float32)
    server.coming.appendleft((0.0, ServerAnswer(999, {"actions": strange})))
    commands = steps(loop, 20)
    assert not any((c.sent == 9).any() for c in commands)
    assert commands[-1].mode == "act"


def test_a_plan_that_runs_out_holds_and_its_next_chunk_goes_on_where_the_robot_is():
    """The answer comes 3 steps into a hold: these 3 steps of it were not acted and are not left
    out."""
    delays = {2: 0.85}
    loop, _, server, _ = made(delay=lambda n: delays.get(n, 0.05), chunk=Numbered(10), replan=5)
    commands = steps(loop, 22)
    modes = [c.mode for c in commands]
    assert modes[:1] == ["hold"]
    first = modes.index("hold", 1)
    held = modes[first:].index("act")
    again = commands[first + held]
    asked = 6
    assert held == 4
    assert round(100 * again.sent[0]) == 2
    assert round(100 * again.sent[1]) == again.tick - asked - held
    assert all("executed" in m for _, m in server.messages[1:])


def test_no_action_is_sent_that_is_older_than_its_age_allows():
    delays = {5: 1.5, 9: 0.9}
    loop, robot, _, _ = made(
        delay=lambda n: delays.get(n, 0.15), chunk=Numbered(40), replan=3, max_age=0.6
    )
    commands = steps(loop, 120)
    acted = [c for c in commands if c.mode == "act"]
    assert max(c.age for c in acted) == 6
    assert {"hold"} < {c.mode for c in commands[20:]}
    assert loop.report.expired >= 1
    assert len(robot.sent) == 120


def test_a_chunk_that_the_robot_did_not_act_on_is_not_continued():
    """Its actions became too old while the answer was refused, so the robot was held."""
    loop, _, server, _ = made(delay=0.05, chunk=Numbered(60), replan=3, max_age=0.8)
    steps(loop, 10)
    server.refuse = "too fast"
    steps(loop, 4)
    server.refuse = None
    held = steps(loop, 20)
    assert {"hold", "act"} == {c.mode for c in held}
    asked = [m for _, m in server.messages]
    fresh = [i for i, m in enumerate(asked) if "executed" not in m]
    assert len(fresh) == 2
    assert fresh[0] == 0 < fresh[1] < len(asked) - 1


def test_a_lost_server_leaves_the_robot_held_until_it_is_back():
    loop, robot, server, _ = made(delay=0.15, replan=4)
    before = steps(loop, 20)
    server.lose()
    gone = steps(loop, 30)
    server.open()
    after = steps(loop, 20)
    assert before[-1].mode == "act"
    first = [c.mode for c in gone].index("hold")
    assert first <= 12
    assert {c.mode for c in gone[first:]} == {"hold"}
    np.testing.assert_array_equal(gone[-1].sent, gone[first - 1].sent)
    assert [c.mode for c in after[:4]] == ["hold", "hold", "act", "act"]
    assert after[-1].mode == "act"
    assert [c.tick for c in before + gone + after] == list(range(70))
    again = next(m for t, m in server.messages if t >= robot.sent[50][0] - 1e-9)
    assert "executed" not in again


def test_a_server_that_was_away_between_two_ticks_is_asked_afresh():
    loop, _, server, _ = made(delay=0.15, replan=4, chunk=Numbered(30))
    commands = steps(loop, 20)
    server.lose()
    server.open()
    asked = len(server.messages)
    commands += steps(loop, 20)
    assert "executed" not in server.messages[asked][1]
    assert "executed" in server.messages[asked + 1][1]
    assert {c.mode for c in commands[3:]} == {"act"}


def test_silence_holds_then_stops_and_the_stop_stays_until_it_is_lifted():
    def retreat(seen, last):
        return last - 0.5

    limits = SafetyLimits(low=-1.0, high=1.0, step=0.1)
    loop, robot, server, _ = made(delay=0.05, stop=retreat, stop_after=2.0, limits=limits)
    steps(loop, 10)
    server.lose()
    silent = steps(loop, 60)
    modes = [c.mode for c in silent]
    assert modes == sorted(modes, key=["act", "hold", "stop"].index)
    last_act = max(c.tick for c in silent if c.mode == "act")
    assert next(c.tick for c in silent if c.mode == "stop") == last_act + 21
    jumps = np.abs(np.diff([action for _, action in robot.sent], axis=0))
    assert jumps.max() <= 0.1 + 1e-12
    assert robot.at.tolist() == [-1.0, -1.0]
    server.open()
    assert {c.mode for c in steps(loop, 30)} == {"stop"}
    assert loop.report.limited["step"] > 0
    loop.resume()
    assert steps(loop, 30)[-1].mode == "act"


@pytest.mark.parametrize("early", [False, True])
def test_after_a_stop_nothing_is_acted_that_was_made_from_what_was_seen_before_it(early):
    """The second answer comes after 6 s, into the stop, or after the robot was resumed from it."""
    loop, _, _, _ = made(
        delay=lambda number: 6.0 if number == 2 else 0.05,
        chunk=Numbered(40),
        replan=5,
        stop=lambda seen, last: np.maximum(last - 0.05, -1.0),
        stop_after=2.0,
    )
    while steps(loop, 1)[0].mode != "stop":
        pass
    while not early and loop.report.answers < 2:
        assert loop.step().mode == "stop"
    assert {c.mode for c in steps(loop, 3)} == {"stop"}
    assert loop.report.expired == (not early)
    loop.resume()
    after = steps(loop, 60)
    acted = [c for c in after if c.mode == "act"]
    assert acted
    assert {c.mode for c in after} == {"hold", "act"}
    assert min(c.tick - c.age for c in acted) >= after[0].tick
    assert round(100 * acted[0].sent[1]) == 0
    assert loop.report.expired == 1


def test_a_refused_request_is_no_chunk_and_is_asked_again_a_second_later():
    loop, _, server, clock = made(delay=0.05, replan=3)
    steps(loop, 10)
    server.refuse = "the state is far out"
    asked, began = len(server.messages), clock.time
    steps(loop, 30)
    times = [time for time, _ in server.messages[asked:]]
    assert 2 <= len(times) <= 4
    assert np.diff(times).min() >= 1.0 - 1e-6
    assert began < times[0]
    server.refuse = None
    assert steps(loop, 15)[-1].mode == "act"
    assert loop.report.refused == len(times)


def test_a_first_request_that_is_refused_ends_the_run_with_the_servers_reason():
    loop, robot, server, _ = made()
    server.refuse = "The observation lacks ['wrist']"
    with pytest.raises(ValueError, match=r"refused the first request: .*lacks \['wrist'\]"):
        loop.run(seconds=5)
    assert all((action == 0).all() for _, action in robot.sent)


def test_commands_keep_their_limits_while_everything_goes_wrong():
    rng = np.random.default_rng(3)
    low, high, step = np.array([-0.5, -0.2]), np.array([0.5, 0.8]), np.array([0.05, 0.1])
    limits = SafetyLimits(low, high, step)
    loop, robot, server, _ = made(
        delay=lambda n: rng.uniform(0, 1.2),
        chunk=lambda m: rng.normal(0, 2, (10, DIMS)),
        limits=limits,
        stop=lambda seen, last: rng.normal(0, 5, DIMS),
        stop_after=1.0,
    )
    robot.slow = {int(n): rng.uniform(0, 0.4) for n in rng.integers(0, 2000, 80)}
    commands = []
    for _ in range(200):
        commands += steps(loop, 10)
        event = rng.integers(6)
        if event == 0:
            server.lose()
        elif event == 1 and server.session is None:
            server.open()
        elif event == 2:
            loop.resume()
    sent = np.array([action for _, action in robot.sent])
    assert (sent >= low).all()
    assert (sent <= high).all()
    assert (np.abs(np.diff(sent, axis=0, prepend=np.zeros((1, DIMS)))) <= step + 1e-12).all()
    ticks = [c.tick for c in commands]
    assert len(ticks) == len(set(ticks)) == len(robot.sent) == 2000
    assert {c.mode for c in commands} == {"act", "hold", "stop"}
    assert loop.report.missed == ticks[-1] + 1 - len(ticks) > 0
    assert loop.report.lost > 0


@pytest.mark.parametrize("overlap", ["latest", "average"])
def test_other_overlaps_ask_a_server_to_continue_nothing(overlap):
    loop, _, server, _ = made(delay=0.15, overlap=overlap, replan=3, chunk=Numbered(30))
    commands = steps(loop, 40)
    assert not any("executed" in message for _, message in server.messages)
    numbers = [100 * c.sent[0] for c in commands if c.mode == "act"]
    whole = [n == pytest.approx(round(n)) for n in numbers]
    assert all(whole) == (overlap == "latest")


def test_a_server_that_tells_nothing_of_itself_is_believed_and_continues_nothing():
    """As openpi's, whose metadata is whatever its owner wrote."""
    loop, _, server, _ = made(delay=0.15, replan=4)
    server.metadata = {"reset_pose": [0.0]}
    server.open()
    assert {c.mode for c in steps(loop, 30)[3:]} == {"act"}
    assert not any("executed" in message for _, message in server.messages)


def test_relative_actions_are_held_by_zeros():
    robot = FakeRobot(FakeClock(), relative=True)
    loop, _, server, _ = made(delay=0.05, robot=robot, limits=SafetyLimits(step=0.05))
    steps(loop, 10)
    server.lose()
    held = [c for c in steps(loop, 30) if c.mode == "hold"]
    assert len(held) > 10
    assert all((c.sent == 0).all() for c in held)


def test_the_last_command_of_a_run_holds_the_robot_whatever_ended_it():
    robot = FakeRobot(FakeClock(), relative=True)
    loop, _, _, _ = made(delay=0.05, robot=robot)
    loop.run(seconds=2)
    assert (robot.sent[-1][1] == 0).all()
    assert (robot.sent[-2][1] != 0).any()

    def broken(seen):
        if len(robot.sent) > 40:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        loop.run(until=broken)
    assert (robot.sent[-1][1] == 0).all()
    assert (robot.sent[-2][1] != 0).any()


def test_an_episode_forgets_the_one_before():
    loop, robot, server, _ = made(delay=0.05, chunk=Numbered(50), replan=20)
    loop.run(seconds=2)
    asked = len(server.messages)
    loop.say("pull")
    commands = len(robot.sent)
    loop.run(seconds=2)
    first = server.messages[asked][1]
    assert "executed" not in first
    assert first["prompt"] == "pull"
    np.testing.assert_array_equal(robot.sent[commands][1], robot.sent[commands - 1][1])


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        (
            {"actions": {"shape": [10, 7]}},
            r"answers with actions of 7 dims, but the robot's `hold` has 2",
        ),
        (
            {"inputs": {"observation/state": {"dtype": "float32", "shape": [9]}}},
            r"reads 'observation/state' with 9 numbers, but the robot gives float32 \[2\]",
        ),
        (
            {"inputs": {"observation/front": {"dtype": "uint8", "shape": ["height", "width", 3]}}},
            r"lacks \['observation/front'\].*--inputs KEY=CAMERA",
        ),
        ({"chunking": []}, "does not continue chunks; start it with --chunking guided"),
        ({"chunking": 5}, "declares chunking as int 5, expected a list of keys"),
    ],
)
def test_a_server_of_another_robot_is_refused_before_the_robot_moves(metadata, why):
    loop, robot, server, _ = made(chunking=True)
    loop.settings = LoopSettings(HZ, chunking=True)
    server.metadata = {**server.metadata, **metadata}
    server.open()
    with pytest.raises(ValueError, match=why):
        loop.run(seconds=5)
    assert robot.sent == []


@pytest.mark.parametrize("status", [True, 0, "ok", [0.1, np.nan], [0.1, -0.9, 0.0]])
def test_what_act_returns_is_no_command_unless_it_is_an_action(status):
    robot = FakeRobot(FakeClock(), at=np.array([0.1, -0.9]))
    act = robot.act
    robot.act = lambda action: act(action) or status
    loop, _, _, _ = made(robot=robot, limits=SafetyLimits(-2.0, 2.0, step=0.05))
    with pytest.raises(ValueError, match=r"`act` returned .* for an action of 2 numbers"):
        loop.run(seconds=5)
    sent = [action.tolist() for _, action in robot.sent]
    assert sent == [pytest.approx([0.1, -0.9])] * 2


def test_a_hold_that_gives_other_numbers_than_it_did_moves_nothing():
    robot = FakeRobot(FakeClock())
    robot.hold = lambda seen, last: np.zeros(DIMS) if last is None else 0.5
    loop, _, _, _ = made(robot=robot, limits=SafetyLimits([-1.0] * DIMS, [1.0] * DIMS))
    with pytest.raises(ValueError, match=r"`hold` returned array\(0\.5\)"):
        loop.run(seconds=5)
    assert [action.tolist() for _, action in robot.sent] == [[0.0, 0.0]]


def test_a_robot_whose_kinematics_fail_is_held_within_its_ranges_all_the_same(caplog):
    def forward(action, seen):
        if (action != 0).any():
            raise RuntimeError("kinematics did not converge")
        return action

    robot = FakeRobot(FakeClock(), relative=True)
    hold, limits = robot.hold, SafetyLimits(high=0.2, box=([-1, -1], [1, 1]), forward=forward)
    robot.hold = lambda seen, last: hold(seen, last) if len(robot.sent) < 5 else np.full(DIMS, 0.3)
    loop, _, _, _ = made(delay=10, robot=robot, limits=limits)
    with pytest.raises(RuntimeError, match="did not converge"):
        loop.run(seconds=5)
    assert [action.tolist() for _, action in robot.sent] == [[0.0, 0.0]] * 5 + [[0.2, 0.2]]
    assert "held without its box" in caplog.text


def test_a_chunk_of_other_dims_ends_the_run_and_holds_the_robot():
    chunks = iter([np.full((4, DIMS), 0.1), np.zeros((4, 3))])
    loop, robot, _, _ = made(delay=0.05, chunk=lambda message: next(chunks), chunking=False)
    with pytest.raises(ValueError, match=r"whose actions have the shape \[4, 3\]"):
        loop.run(seconds=5)
    np.testing.assert_array_equal(robot.sent[-1][1], robot.sent[-2][1])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"hz": 0}, "above 0"),
        ({"hz": 10, "replan": 0}, "at least 1"),
        ({"hz": 10, "overlap": "newest"}, "frozen, latest or average"),
        ({"hz": 10, "overlap": "average", "chunking": True}, "use overlap='frozen'"),
        ({"hz": 10, "max_age": 0.05}, "less than one tick"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, why):
    with pytest.raises(ValueError, match=why):
        LoopSettings(**given)
