// What the collectives of backend "hosts" compute, through c10d's interface, for all ways in which
// ranks may lie on hosts.

#include "support/collective_checks.h"
#include "support/errors.h"
#include "support/host_groups.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2::testing::hosts_backend {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

c10::intrusive_ptr<c10d::Backend> backend() {
  const auto backend = cpu_backend(world_group());
  EXPECT_EQ(backend->getBackendName(), "hosts");
  return backend;
}

// In elements. 4096 floats are the most that an all-reduce sends whole.
constexpr std::array<int64_t, 6> kSizes = {0, 1, 7, 4096, 4097, 65'537};

/// One dtype has more.
std::vector<int64_t> sizes_of(at::ScalarType type) {
  std::vector<int64_t> sizes(kSizes.begin(), kSizes.end());
  if (type == at::kFloat) sizes.push_back(1'000'001);
  return sizes;
}

/// As the sums of the hosts, in order of their first ranks; each that of its ranks, rounded.
Tensor reduced_by_host(const Tensors& inputs, const Hosts& hosts, RedOp op) {
  Hosts order;
  for (const std::string& host : hosts) {
    if (std::find(order.begin(), order.end(), host) == order.end()) order.push_back(host);
  }
  Tensors sums;
  for (const std::string& host : order) {
    Tensors of_host;
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      if (hosts[rank] == host) of_host.push_back(inputs[rank]);
    }
    sums.push_back(reduced(of_host, op == RedOp::AVG ? RedOp::SUM : op));
  }
  return reduced(sums, op, inputs.size());
}

Tensors all_brought(size_t ranks, const std::function<Tensor(int rank)>& of) {
  Tensors all;
  for (size_t rank = 0; rank < ranks; ++rank) all.push_back(of(static_cast<int>(rank)));
  return all;
}

class HostsBackend : public ::testing::TestWithParam<Hosts> {};
INSTANTIATE_TEST_SUITE_P(Shapes, HostsBackend, ::testing::ValuesIn(host_shapes()));

TEST_P(HostsBackend, AllGather) {
  on_hosts(GetParam(), [](int) {
    for (const auto type : {at::kByte, at::kFloat, at::kBFloat16, at::kComplexDouble}) {
      for (const int64_t size : sizes_of(type)) check_all_gather(*backend(), size, type);
    }
  });
}

TEST_P(HostsBackend, SumsAndAveragesOfEverySize) {
  on_hosts(GetParam(), [this](int) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kComplexFloat}) {
      for (const int64_t size : sizes_of(type)) {
        const Tensors inputs = all_brought(
            GetParam().size(), [&](int rank) { return random_values(rank, size, type); });
        for (const RedOp op : {RedOp::SUM, RedOp::AVG})
          check_reductions(*backend(), inputs, reduced_by_host(inputs, GetParam(), op), op);
      }
    }
  });
}

TEST_P(HostsBackend, EveryOpOfEveryDtype) {
  on_hosts(GetParam(), [this](int rank) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kShort,
                            at::kChar, at::kByte, at::kBool, at::kComplexDouble}) {
      for (int op = RedOp::SUM; op < RedOp::PREMUL_SUM; ++op) {
        const auto typed = static_cast<RedOp>(op);
        if (!can_be_reduced(type, typed)) {
          c10d::AllreduceOptions options;
          options.reduceOp = typed;
          Tensors tensors = {brought(rank, 3, type)};
          EXPECT_THAT(error_of([&] { backend()->allreduce(tensors, options)->wait(); }),
                      HasSubstr("cannot be made"));
          continue;
        }
        for (const int64_t size : {int64_t{3}, int64_t{30'001}}) {
          const Tensors inputs =
              all_brought(GetParam().size(), [&](int other) { return brought(other, size, type); });
          check_reductions(*backend(), inputs, reduced_by_host(inputs, GetParam(), typed), typed);
        }
      }
    }
  });
}

TEST_P(HostsBackend, PremultipliedSums) {
  on_hosts(GetParam(), [](int) {
    for (const int64_t size : {3, 100'000}) check_premultiplied_sums(*backend(), size);
  });
}

TEST_P(HostsBackend, NaNsAndInfinitiesStay) {
  on_hosts(GetParam(), [](int rank) {
    const float inf = INFINITY;
    for (const int64_t repeats : {1, 20'000}) {
      Tensors tensors = {torch::tensor({rank == 1 ? NAN : 1.0F, rank == 0 ? inf : 1.0F,
                                        rank < 2 ? (rank == 0 ? inf : -inf) : 0.0F, -0.0F})
                             .repeat({repeats})};
      backend()->allreduce(tensors)->wait();
      const Tensor rows = tensors[0].view({repeats, 4});
      EXPECT_TRUE(rows.select(1, 0).isnan().all().item<bool>());
      EXPECT_TRUE(rows.select(1, 1).isposinf().all().item<bool>());
      EXPECT_TRUE(rows.select(1, 2).isnan().all().item<bool>());
      EXPECT_TRUE(rows.select(1, 3).signbit().all().item<bool>());
    }
  });
}

TEST_P(HostsBackend, WhatGlooDoesComesThrough) {
  const int world = static_cast<int>(GetParam().size());
  on_hosts(GetParam(), [world](int rank) {
    const auto part = [](int of) { return brought(of, 5, at::kFloat); };
    const Tensors parts = all_brought(static_cast<size_t>(world), part);
    const Tensor all = torch::cat(parts);
    const int root = world - 1;

    Tensors one = {part(rank)};
    c10d::BroadcastOptions from_root;
    from_root.rootRank = root;
    backend()->broadcast(one, from_root)->wait();
    expect_same_bits(one[0], part(root), "broadcast");
    backend()->barrier()->wait();
    backend()->monitoredBarrier({});

    std::vector<Tensors> lists(1, Tensors(static_cast<size_t>(world)));
    for (Tensor& tensor : lists[0]) tensor = torch::zeros({5});
    std::vector<Tensors> at_root = rank == root ? lists : std::vector<Tensors>();
    one = {part(rank)};
    c10d::GatherOptions to_root;
    to_root.rootRank = root;
    backend()->gather(at_root, one, to_root)->wait();
    if (rank == root) expect_same_bits(torch::cat(at_root[0]), all, "gather");
    backend()->allgather(lists, one)->wait();
    expect_same_bits(torch::cat(lists[0]), all, "all_gather of a list");

    at_root = rank == root ? std::vector<Tensors>{parts} : std::vector<Tensors>();
    c10d::ScatterOptions scatter;
    scatter.rootRank = root;
    backend()->scatter(one, at_root, scatter)->wait();
    expect_same_bits(one[0], part(rank), "scatter");

    Tensor input = torch::full({world}, rank * 1.0), output = torch::zeros({world});
    std::vector<int64_t> even;
    backend()->alltoall_base(output, input, even, even)->wait();
    expect_same_bits(output, torch::arange(static_cast<double>(world)).to(at::kFloat), "alltoall");

    Tensors sent = {part(rank)}, received = {torch::zeros({5})};
    const Work send = backend()->send(sent, (rank + 1) % world, 3);
    backend()->recv(received, (rank + world - 1) % world, 3)->wait();
    send->wait();
    expect_same_bits(received[0], part((rank + world - 1) % world), "recv");

    Tensors sums = {torch::ones({3}), torch::full({2}, 2.0)};
    backend()->allreduce_coalesced(sums)->wait();
    expect_same_bits(sums[1], torch::full({2}, 2.0 * world), "all_reduce of several");
    Tensors sum = {torch::ones({3})};
    c10d::ReduceOptions reduce;
    reduce.rootRank = root;
    backend()->reduce(sum, reduce)->wait();
    if (rank == root) expect_same_bits(sum[0], torch::full({3}, 1.0 * world), "reduce");
  });
}

TEST(HostsRefusals, OfWhatCannotBe) {
  on_hosts({"a", "a", "b"}, [](int) {
    Tensors tensors = {torch::ones({4, 4}).t()[0]};
    EXPECT_THAT(error_of([&] { backend()->allreduce(tensors); }), HasSubstr("is not contiguous"));
    tensors = {torch::ones({2}), torch::ones({2})};
    EXPECT_THAT(error_of([&] { backend()->allreduce(tensors); }), HasSubstr("one tensor a rank"));
    Tensor input = torch::ones({2}), output = torch::ones({5});
    EXPECT_THAT(error_of([&] { backend()->_allgather_base(output, input); }),
                HasSubstr("tensors of 5 and 2 elements for 3 ranks"));
    Tensor wide = torch::ones({6}, at::kDouble);
    EXPECT_THAT(error_of([&] { backend()->_reduce_scatter_base(input, wide); }),
                HasSubstr("tensors of Double and Float"));
    tensors = {input};
    EXPECT_THAT(error_of([&] { backend()->send(tensors, 0, 0x40000000); }),
                HasSubstr("must be below"));
    // Nothing of this has done harm.
    backend()->allreduce(tensors)->wait();
    EXPECT_TRUE(tensors[0].equal(torch::full({2}, 3.0)));
  });
}

}  // namespace
}  // namespace fsdp2::testing::hosts_backend
