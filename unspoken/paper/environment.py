"""Where commands run: the program, what its processes inherit, what this machine is fast at, and what stops them."""

import os
import signal
import sys

import torch

PROGRAM = (sys.executable, "-m", "unspoken.cli")


def prepare_environment() -> None:
    """One thread for each command, as several may run side by side; nothing is fetched from a model hub."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def is_bfloat16_fast() -> bool:
    """Whether the recipes' bf16 autocast pays here: a processor without instructions for it is slower than in fp32."""
    return torch.cuda.is_available() or any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)


def interrupt_on_signals() -> None:
    """SIGTERM and SIGHUP end a pipeline as Ctrl-C does, with checkpoints saved; under nohup SIGHUP is ignored still."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
