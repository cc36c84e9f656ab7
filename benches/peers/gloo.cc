// Times one operation of Gloo over TCP; arguments behind the first three, output and method as in mpi.c.
//
//   gloo RANK RANKS STORE_DIRECTORY OP FROM TO FACTOR
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Sum = void (*)(void*, const void*, const void*, size_t);

int calls(size_t bytes) {
  return bytes <= 4096 ? 1000 : bytes <= 262144 ? 200 : bytes <= (4u << 20) ? 20 : 4;
}

// As in mpi.c.
size_t following(size_t bytes, size_t to, size_t factor) {
  return bytes < to && bytes * factor > to ? to : bytes * factor;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    fprintf(stderr, "usage: gloo RANK RANKS STORE_DIRECTORY OP FROM TO FACTOR\n");
    return 2;
  }
  const int rank = atoi(argv[1]), ranks = atoi(argv[2]);
  const std::string op = argv[4];
  const size_t from = strtoull(argv[5], nullptr, 10), to = strtoull(argv[6], nullptr, 10);
  const size_t factor = strtoull(argv[7], nullptr, 10);

  auto device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr("127.0.0.1"));
  gloo::rendezvous::FileStore store(argv[3]);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
  context->connectFullMesh(store, device);
  auto barrier = [&] {
    gloo::BarrierOptions options(context);
    gloo::barrier(options);
  };

  std::vector<float> in(to / 4 + 1), out(to / 4 + 1);
  for (size_t bytes = from; bytes <= to; bytes = following(bytes, to, factor)) {
    std::unique_ptr<gloo::transport::UnboundBuffer> sending, receiving;
    if (op == "ping_pong" && rank < 2) {
      sending = context->createUnboundBuffer(in.data(), bytes);
      receiving = context->createUnboundBuffer(out.data(), bytes);
    }
    const int iterations = calls(bytes);
    std::vector<double> times;
    for (int batch = -1; batch < 9; batch++) {
      barrier();
      const auto begin = Clock::now();
      for (int i = 0; i < iterations; i++) {
        if (op == "all_reduce") {
          gloo::AllreduceOptions options(context);
          options.setInput(in.data(), bytes / 4);
          options.setOutput(out.data(), bytes / 4);
          options.setReduceFunction(gloo::AllreduceOptions::Func(static_cast<Sum>(&gloo::sum<float>)));
          gloo::allreduce(options);
        } else if (op == "all_gather") {
          gloo::AllgatherOptions options(context);
          options.setInput(in.data(), bytes / 4 / ranks);
          options.setOutput(out.data(), bytes / 4 / ranks * ranks);
          gloo::allgather(options);
        } else if (op == "barrier") {
          barrier();
        } else if (rank == 0) {
          sending->send(1, 7);
          receiving->recv(1, 8);
          sending->waitSend();
          receiving->waitRecv();
        } else if (rank == 1) {
          receiving->recv(0, 7);
          receiving->waitRecv();
          sending->send(0, 8);
          sending->waitSend();
        }
      }
      const std::chrono::duration<double, std::micro> elapsed = Clock::now() - begin;
      if (batch >= 0) times.push_back(elapsed.count() / iterations);
    }
    std::sort(times.begin(), times.end());
    if (rank == 0) {
      printf("%s %zu %d %.3f %.3f\n", op.c_str(), op == "barrier" ? 0 : bytes, ranks, times[4], times[0]);
      fflush(stdout);
    }
    if (op == "barrier") break;
  }
}
