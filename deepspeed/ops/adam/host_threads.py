"""How many threads the host kernels use."""

import os


def host_threads() -> int:
    """Returns the number of threads for the host kernels of this process.

    The user's number if there is one: DS_HOST_THREADS, else OMP_NUM_THREADS. torchrun sets OMP_NUM_THREADS=1
    for each of several local ranks; that is not the user's word. Without one, the cores that SLURM gives each
    task, if ranks are tasks; else those that this process may run on, divided by the ranks of this node, at
    least 1.

    Raises:
        ValueError: a number that is not 1 or more.
    """
    local_ranks = _positive("LOCAL_WORLD_SIZE") or 1
    chosen = _positive("DS_HOST_THREADS")
    if chosen is not None:
        return chosen
    # OpenMP allows a list, one number a nesting level: ours is the outermost.
    openmp = _positive("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "").split(",")[0])
    if openmp is not None and not (openmp == 1 and local_ranks > 1):
        return openmp
    cores = len(os.sched_getaffinity(0))
    # A task may be bound to its share of the cores, which is not to be divided again.
    share = _positive("SLURM_CPUS_PER_TASK") if _is_slurm_task() else None
    return min(share, cores) if share is not None else max(1, cores // local_ranks)


def threads_beside_launches() -> int:
    """Returns `host_threads` less one, for the thread that launches copies meanwhile.

    A kernel whose threads outnumber the free cores waits for the one that has none: 0.33 against 0.21 ns a
    parameter beside pageable copies, 0.23 against 0.20 beside page-locked ones (benchmarks/README.md).
    """
    return max(1, host_threads() - 1)


def threads_beside_backward() -> int:
    """Returns `host_threads` less an eighth, for backward, or for copies that the processor makes."""
    threads = host_threads()
    return max(1, threads - max(1, threads // 8))


def _is_slurm_task() -> bool:
    """Whether srun started this very rank, and not torchrun under it."""
    rank = os.environ.get("SLURM_PROCID")
    return rank is not None and rank == os.environ.get("RANK") and "TORCHELASTIC_RUN_ID" not in os.environ


def _positive(name: str, text: str | None = None) -> int | None:
    text = (os.environ.get(name, "") if text is None else text).strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}: expected a whole number of 1 or more, got {text!r}. Correct or unset it.")
    return int(text)
