"""Times one operation of MLX's ring backend; arguments, output and method as in mpi.c.

    mlx_ring.py OP FROM TO FACTOR

An array is evaluated for every call, as a program would; MLX has no barrier.
"""

import sys
import time

import mlx.core as mx

BATCHES = 9


def calls(size):
    return 300 if size <= 4096 else 60 if size <= 262144 else 12 if size <= 4 << 20 else 4


def main():
    op, first, last, factor = sys.argv[1], *map(int, sys.argv[2:5])
    group = mx.distributed.init(backend="ring", strict=True)
    rank, ranks = group.rank(), group.size()
    size = first
    while size <= last:
        elements = size // 4 // ranks if op == "all_gather" else size // 4
        x = mx.zeros((max(elements, 1),), dtype=mx.float32)
        mx.eval(x)
        times = []
        for batch in range(-1, BATCHES):
            mx.eval(mx.distributed.all_sum(mx.zeros((1,)), group=group))
            begin = time.perf_counter()
            for _ in range(calls(size)):
                if op == "all_reduce":
                    mx.eval(mx.distributed.all_sum(x, group=group))
                elif op == "all_gather":
                    mx.eval(mx.distributed.all_gather(x, group=group))
                elif rank == 0:
                    mx.eval(mx.distributed.send(x, 1, group=group))
                    mx.eval(mx.distributed.recv_like(x, 1, group=group))
                elif rank == 1:
                    mx.eval(mx.distributed.recv_like(x, 0, group=group))
                    mx.eval(mx.distributed.send(x, 0, group=group))
            elapsed = (time.perf_counter() - begin) * 1e6 / calls(size)
            if batch >= 0:
                times.append(elapsed)
        times.sort()
        if rank == 0:
            print(op, size, ranks, f"{times[BATCHES // 2]:.3f} {times[0]:.3f}", flush=True)
        # The last size is measured too, as in mpi.c.
        size = last if size < last < size * factor else size * factor


if __name__ == "__main__":
    main()
