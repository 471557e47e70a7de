"""A process finds its place: options, the launcher, what clusters put in the environment."""

import os

import jax
import pytest

from parallel.hosts.job import Job, find_job, start

CLUSTERS = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "MPI_",
    "CHILIAD_",
    "KUBERNETES_",
    "JOB_COMPLETION",
    "CUDA_VISIBLE",
)


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    for name in os.environ:
        if name.startswith(CLUSTERS):
            monkeypatch.delenv(name)


@pytest.fixture
def slurm(monkeypatch):
    """The third of four tasks on two nodes, as srun sets it."""
    for name, value in {
        "SLURM_JOB_ID": "4097",
        "SLURM_STEP_NODELIST": "node[007-008]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }.items():
        monkeypatch.setenv(name, value)


def test_a_process_of_no_cluster_is_alone():
    assert find_job() is None


def test_options_say_all_by_hand():
    assert find_job("10.0.0.1:9000", 4, 3) == Job("10.0.0.1:9000", 4, 3)


def test_what_the_launcher_set_is_taken(monkeypatch):
    for name, value in (("COORDINATOR", "127.0.0.1:5"), ("PROCESSES", "2"), ("RANK", "1")):
        monkeypatch.setenv(f"CHILIAD_{name}", value)
    assert find_job() == Job("127.0.0.1:5", 2, 1)
    monkeypatch.setenv("CHILIAD_RANK", "one")
    with pytest.raises(ValueError, match="CHILIAD_RANK is 'one'"):
        find_job()


def test_slurm_tells_the_first_node_and_each_task_its_device(slurm):
    assert find_job() == Job("node007:61441", 4, 2, device=0)


def test_one_task_on_each_slurm_node_has_all_of_its_devices(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")
    assert find_job() == Job("node007:61441", 4, 2)


def test_devices_that_slurm_bound_to_a_task_are_all_its_own(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = find_job()
    assert found is not None
    assert found.device is None


def test_options_go_before_the_cluster_and_one_process_asks_nobody(slurm):
    found = find_job("other:1")
    assert found is not None
    assert (found.coordinator, found.processes, found.rank) == ("other:1", 4, 2)
    assert find_job(num_processes=1) is None


def test_a_slurm_job_of_one_task_is_alone(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert find_job() is None


def test_open_mpi_is_known_with_its_daemons_address(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
    for name, value in (("SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    found = find_job()
    assert found is not None
    assert found.coordinator.startswith("10.96.0.1:")
    assert (found.processes, found.rank, found.device) == (2, 1, 1)


def test_one_process_of_mpi_on_each_machine_has_all_of_its_devices(monkeypatch):
    """MPICH's and Intel MPI's names."""
    told = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert find_job("host0:9000") == Job("host0:9000", 2, 1, device=0)
    monkeypatch.setenv("MPI_LOCALNRANKS", "1")
    assert find_job("host0:9000") == Job("host0:9000", 2, 1)


def test_a_process_that_is_alone_sees_the_devices_that_the_launcher_dealt_it(monkeypatch):
    told = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    start()
    assert told == {"jax_cuda_visible_devices": "2,3"}


@pytest.mark.parametrize("prefix", ["OMPI_COMM_WORLD_", "PMI_"])
def test_other_mpi_tells_ranks_but_not_where_the_first_is(monkeypatch, prefix):
    monkeypatch.setenv(f"{prefix}SIZE", "2")
    monkeypatch.setenv(f"{prefix}RANK", "1")
    with pytest.raises(ValueError, match="--coordinator: missing, and MPI does not supply them"):
        find_job()
    assert find_job("10.0.0.1:9000") == Job("10.0.0.1:9000", 2, 1)


def test_a_pod_of_an_indexed_job_without_the_client_is_refused_and_a_plain_pod_is_alone(
    monkeypatch,
):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert find_job() is None
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with (
        pytest.warns(UserWarning, match="Kubernetes environment detected"),
        pytest.raises(ValueError, match=r"pip install 'jax\[k8s\]'"),
    ):
        find_job()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("a:1", None, None), "--num-processes and --process-id: missing"),
        ((None, 2, None), "--coordinator and --process-id: missing"),
        ((None, None, 0), "--coordinator and --num-processes: missing"),
        (("a:1", 2, 2), "--process-id is 2 and --num-processes 2"),
        (("a:1", 0, 0), "--process-id is 0 and --num-processes 0"),
        (("a", 2, 0), "--coordinator is 'a'; expected HOST:PORT"),
        (("a:b", 2, 0), "--coordinator is 'a:b'; expected HOST:PORT"),
        (("a:99999", 2, 0), "--coordinator is 'a:99999'; expected HOST:PORT"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_option(options, named):
    with pytest.raises(ValueError, match=named):
        find_job(*options)


@pytest.mark.parametrize(
    ("coordinator", "bind"),
    [
        ("127.0.0.1:5", "127.0.0.1:5"),
        ("localhost:5", "localhost:5"),
        ("[::1]:5", "[::1]:5"),
        ("10.0.0.1:5", None),
        ("node007:5", None),
    ],
)
def test_a_coordinator_on_the_loopback_listens_there_alone(coordinator, bind):
    assert Job(coordinator, 2, 0).bind == bind
