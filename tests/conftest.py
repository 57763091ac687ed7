"""One thread and no network, for every test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["COLUMNS"] = "250"  # a printed line is not broken in the middle of a path or a word
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the suite is for CPUs: same numbers everywhere

import socket

import pytest
import torch

torch.set_num_threads(1)

LOCAL = ("127.0.0.1", "::1", "localhost")


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Connections to other machines fail; processes of one test may still talk to each other."""
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOCAL:
            raise OSError(f"a test reached for the network: {address}")
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(autouse=True)
def seeded():
    """Tests draw random numbers from a known state and leave none behind."""
    torch.manual_seed(0)


@pytest.fixture
def num_graphs():
    """Compile from scratch; call it for how many graphs were compiled since."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
