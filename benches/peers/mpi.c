/* Times one MPI operation for a range of sizes. Prints a line a size: op bytes ranks median_us min_us
 *
 *   mpi OP FROM TO FACTOR      OP: all_reduce, all_gather, ping_pong, barrier; sizes in bytes as nccl-tests counts them
 *
 * The method is that of `raccl bench`: nine batches of back-to-back calls after one for warming up, each batch after a barrier,
 * time per call on rank 0. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCHES = 9 };

static int by_size(const void *left, const void *right) {
  double a = *(const double *)left, b = *(const double *)right;
  return (a > b) - (a < b);
}

static int calls(size_t bytes) {
  return bytes <= 4096 ? 1000 : bytes <= 262144 ? 200 : bytes <= (4u << 20) ? 20 : 4;
}

/* The last size is measured too, where no power of the factor leads to it. */
static size_t following(size_t bytes, size_t to, size_t factor) {
  return bytes < to && bytes * factor > to ? to : bytes * factor;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  if (argc != 5) {
    fprintf(stderr, "usage: mpi OP FROM TO FACTOR\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  const char *op = argv[1];
  size_t from = strtoull(argv[2], NULL, 10), to = strtoull(argv[3], NULL, 10), factor = strtoull(argv[4], NULL, 10);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  char *in = aligned_alloc(4096, (to + 4095) / 4096 * 4096), *out = aligned_alloc(4096, (to + 4095) / 4096 * 4096);
  memset(in, 0, to);
  memset(out, 0, to);
  for (size_t bytes = from; bytes <= to; bytes = following(bytes, to, factor)) {
    double times[BATCHES];
    int iterations = calls(bytes), part = (int)(bytes / (size_t)ranks);
    for (int batch = -1; batch < BATCHES; batch++) {
      MPI_Barrier(MPI_COMM_WORLD);
      double begin = MPI_Wtime();
      for (int i = 0; i < iterations; i++) {
        if (!strcmp(op, "all_reduce")) {
          MPI_Allreduce(in, out, (int)(bytes / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        } else if (!strcmp(op, "all_gather")) {
          MPI_Allgather(in, part, MPI_BYTE, out, part, MPI_BYTE, MPI_COMM_WORLD);
        } else if (!strcmp(op, "barrier")) {
          MPI_Barrier(MPI_COMM_WORLD);
        } else if (rank == 0) {
          MPI_Send(in, (int)bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
          MPI_Recv(out, (int)bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else if (rank == 1) {
          MPI_Recv(out, (int)bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
          MPI_Send(in, (int)bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
        }
      }
      if (batch >= 0) times[batch] = (MPI_Wtime() - begin) * 1e6 / iterations;
    }
    qsort(times, BATCHES, sizeof(double), by_size);
    if (rank == 0) {
      printf("%s %zu %d %.3f %.3f\n", op, strcmp(op, "barrier") ? bytes : 0, ranks, times[BATCHES / 2], times[0]);
      fflush(stdout);
    }
    if (!strcmp(op, "barrier")) break;
  }
  MPI_Finalize();
  return 0;
}
