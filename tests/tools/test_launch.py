"""The launcher's options become its plan."""

import sys

import pytest

from parallel.hosts.supervisor import LaunchPlan
from tools import launch


def test_each_option_of_a_launch_is_the_field_of_its_plan(monkeypatch):
    plans = []
    monkeypatch.setattr(launch, "supervise", lambda plan: plans.append(plan) or 3)
    typed = "-n 4 --devices-per-process 2 --max-restarts 5 --min-processes 1 --nodes 6"
    more = "--node-rank 7 --coordinator host0:9000 -- true --nodes 8"
    monkeypatch.setattr(sys, "argv", ["launch", *typed.split(), *more.split()])
    with pytest.raises(SystemExit) as ended:
        launch.main()
    assert ended.value.code == 3
    assert plans == [
        LaunchPlan(
            ["true", "--nodes", "8"],
            processes=4,
            devices=2,
            max_restarts=5,
            min_processes=1,
            nodes=6,
            node=7,
            coordinator="host0:9000",
        )
    ]
