"""Replicas on Ray Serve, on two nodes: `pip install '.[ray]'`, `pytest -m slow tests/serve/extensions/replicas`."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

pytest.importorskip("ray.serve")

from helpers.processes import soon
from helpers.ray_program import RayProgram, Stream, workers
from helpers.serving import PROMPTS, offline, text_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """Two nodes with room for a replica each."""
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
    nodes.add_node(num_cpus=1, object_store_memory=100 << 20)
    nodes.wait_for_nodes()
    patch.setenv("RAY_ADDRESS", nodes.address)
    yield nodes
    nodes.shutdown()
    patch.undo()


@pytest.fixture(scope="module")
def program(cluster) -> Iterator[RayProgram]:
    program = RayProgram("--ray", "2", "--session-affinity")
    yield program
    if program.process.poll() is None:
        program.end()


def read_all(program: RayProgram, jobs: list[dict]) -> list[Stream]:
    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(lambda job: Stream().read(program.url, **job), jobs))


def expected(pair: tuple, prompt: str, seed: int, count: int) -> str:
    return text_of(pair, offline(pair, prompt, count, seed=seed, temperature=0.8, min_new_tokens=count))


def jobs_of(count: int, tokens: int) -> list[dict]:
    drawn = {"temperature": 0.8, "max_tokens": tokens, "min_tokens": tokens}
    return [{"prompt": PROMPTS[number % 4], "seed": number, **drawn} for number in range(count)]


def test_each_node_has_a_replica(program):
    assert len(program.await_replicas(2)) == 2
    assert len({worker.ppid() for worker in workers()}) == 2  # their nodes' own processes


def test_a_session_stays_with_one_replica(program):
    def replica(session: str) -> str:
        return httpx.get(f"{program.url}/v1/models", headers={"X-Session-Id": session}, timeout=300).headers[
            "x-replica"
        ]

    assert len({replica("one") for _ in range(6)}) == 1
    assert len({replica(f"session {number}") for number in range(20)}) == 2


def test_a_text_is_what_one_engine_writes(program, pair):
    [stream] = read_all(program, jobs_of(1, 30))
    assert stream.text == expected(pair, PROMPTS[0], 0, 30)


def test_a_client_that_leaves_ends_its_text(program):
    assert soon(lambda: program.running() == 0)
    body = {"prompt": PROMPTS[0], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{program.url}/v1/completions", json=body, timeout=300) as answer:
        lines = answer.iter_lines()  # kept: the connection closes with it
        next(lines)
        assert soon(lambda: program.running() == 1)
    assert soon(lambda: program.running() == 0)


def test_a_user_error_is_the_replicas_own_answer(program):
    answer = httpx.post(f"{program.url}/v1/completions", json={"prompt": "a", "suffix": "b"}, timeout=300)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")


@pytest.mark.parametrize("what", ["worker", "engine", "node"])
def test_streams_of_a_lost_replica_end_with_an_error_and_it_is_replaced(what, program, cluster, pair):
    before = program.await_replicas(2)
    jobs = jobs_of(8, 150)
    streams = [Stream() for _ in jobs]
    with ThreadPoolExecutor(len(jobs)) as threads:
        done = [threads.submit(stream.read, program.url, **job) for stream, job in zip(streams, jobs, strict=True)]
        assert all(stream.begun.wait(300) for stream in streams)
        engines = lose(what, cluster)
        for future in done:
            future.result()
    [lost] = before - program.await_replicas(2, other_than=before)
    for stream, job in zip(streams, jobs, strict=True):
        whole = expected(pair, job["prompt"], job["seed"], 150)
        assert (stream.error is None, stream.text == whole) == (stream.replica != lost,) * 2, stream
        assert whole.startswith(stream.text)
        assert what != "engine" or stream.replica != lost or lost in str(stream.error)
    assert any(stream.replica == lost for stream in streams)
    assert soon(lambda: not any(engine.is_running() for engine in engines))  # it holds the GPU's memory
    assert Stream().read(program.url, **jobs[0]).text == expected(pair, jobs[0]["prompt"], jobs[0]["seed"], 150)


def lose(what: str, cluster) -> list[psutil.Process]:
    """End a replica by force: its process, its engine's process, or its machine, and return its engine's process.

    Another machine replaces the machine.
    """
    if what == "node":
        node = cluster.list_all_nodes()[-1]
        [raylet] = node.all_processes["raylet"]
        replicas = [worker for worker in workers() if worker.ppid() == raylet.process.pid]
        engines = [engine for replica in replicas for engine in replica.children()]
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        return engines
    worker = workers()[0]
    engine = max(worker.children(), key=lambda child: child.memory_info().rss)
    victim = worker if what == "worker" else engine
    victim.kill()
    psutil.wait_procs([victim], timeout=300)
    return [engine]


def test_sigterm_lets_running_texts_end(program, pair):
    stream = Stream()
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(stream.read, program.url, **jobs_of(1, 300)[0])
        assert stream.begun.wait(300)
        assert threads.submit(program.end).result() == 0
        reading.result()
    assert stream.text == expected(pair, PROMPTS[0], 0, 300)


def test_replicas_are_added_while_there_are_more_requests_than_they_should_have(cluster):
    program = RayProgram("--ray", "--max-replicas", "2", "--max-batch-size", "1")
    try:
        assert len(program.replicas) == 1
        added = threading.Event()

        def load(job: dict) -> None:
            while not added.is_set():
                assert Stream().read(program.url, **job).error is None

        with ThreadPoolExecutor(6) as threads:
            loading = [threads.submit(load, job) for job in jobs_of(6, 300)]
            try:
                assert len(program.await_replicas(2)) == 2
            finally:
                added.set()
            for future in loading:
                future.result()
    finally:
        program.end()
