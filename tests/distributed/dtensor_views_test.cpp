// Views of elements that lie on several ranks: as views of the whole tensor, also when either is
// written.
#include "support/errors.h"
#include "support/ranks.h"
#include "support/tensors.h"
#include "support/training.h"

#include <fsdp2/collectives.h>
#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <vector>

namespace fsdp2::testing::dtensor_views {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using torch::indexing::Slice;

std::vector<std::function<Tensor(const Tensor&)>> views() {
  return {
      [](const Tensor& t) { return t.view(-1); },
      [](const Tensor& t) { return t.view({3, 7, 4}); },
      [](const Tensor& t) { return t.flatten(); },
      [](const Tensor& t) { return t.flatten(0, 1); },
      [](const Tensor& t) { return t[0]; },
      [](const Tensor& t) { return t[2][1]; },
      [](const Tensor& t) { return t.select(0, -1).t(); },
      [](const Tensor& t) { return t.slice(0, 1, 6, 2); },
      [](const Tensor& t) { return t.narrow(0, 2, 3).view(-1); },
      [](const Tensor& t) { return t.index({Slice(1, 3), 2, Slice()}); },
      [](const Tensor& t) { return t.split(3)[1]; },
      [](const Tensor& t) { return t.chunk(2)[0].mul(1); },
      [](const Tensor& t) { return t.unbind()[4]; },
      [](const Tensor& t) { return t.unbind(1)[2].unbind()[3]; },
      [](const Tensor& t) { return t.diagonal(); },
      [](const Tensor& t) { return t.unfold(0, 2, 1); },
      [](const Tensor& t) { return t.slice(1, 1, 2).squeeze().slice(0, 1, 2).squeeze(0); },
      [](const Tensor& t) { return t.slice(0, 3, 4).squeeze(); },
      [](const Tensor& t) { return t.slice(0, 3, 4).expand({5, 3, 4}); },
      [](const Tensor& t) { return t.permute({2, 0, 1}).reshape({4, -1}); },
      [](const Tensor& t) { return t.movedim(0, 2).select(2, 1); },
      [](const Tensor& t) { return t.unsqueeze(0).squeeze(0).select(2, 1); },
  };
}

void on_layouts(const std::function<void(const Tensor& whole, const Tensor& parts)>& body) {
  const auto run = [&](const DeviceMesh& mesh, const Placements& placements) {
    const Tensor whole = torch::arange(84).view({7, 3, 4}).to(torch::kFloat);
    body(whole, chunk_tensor(whole, mesh, placements));
  };
  for (const int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      for (const int64_t dim : {0, 1, 2}) run(mesh, {Shard(dim)});
      run(mesh, {Replicate()});
    });
  }
  on_ranks(4, [&](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    run(mesh, {Shard(0), Shard(0)});
    run(mesh, {Replicate(), Shard(0)});
    run(mesh, {Shard(1), Shard(0)});
  });
}

TEST(Views, HaveTheValuesOfViewsOfTheWhole) {
  on_layouts([](const Tensor& whole, const Tensor& parts) {
    size_t index = 0;
    for (const auto& view : views()) {
      EXPECT_EQ(difference(full(view(parts)), view(whole)), 0)
          << index << " of " << to_string(DTensor(parts).placements());
      ++index;
    }
  });
}

TEST(Views, AreDifferentiable) {
  on_layouts([](const Tensor& whole, const Tensor& parts) {
    size_t index = 0;
    for (const auto& view : views()) {
      const Tensor a = whole.detach().clone().requires_grad_();
      const Tensor b = parts.detach().clone().requires_grad_();
      view(a).pow(2).sum().backward();
      view(b).pow(2).sum().backward();
      EXPECT_EQ(difference(full(b.grad()), a.grad()), 0)
          << index << " of " << to_string(DTensor(parts).placements());
      EXPECT_EQ(DTensor(b.grad()).placements(), DTensor(b).placements());
      ++index;
    }
  });
}

TEST(Views, WriteThrough) {
  on_layouts([](const Tensor& whole, const Tensor& parts) {
    const auto write = [](Tensor t) {
      t[2].fill_(-1);
      t[3][1] = 5;
      t.view(-1).slice(0, 70, 80).mul_(2);
      t.slice(0, 0, 2).add_(1);
      t.index_put_({4, 1, 2}, 9.0);
      t.index({Slice(5, 7)}).zero_();
      t.select(0, 1).copy_(t.select(0, 4));
      t.diagonal().neg_();
      t.data()[0].t().exp_();
      t.unbind()[6].normal_().zero_();
    };
    write(whole);
    write(parts);
    EXPECT_EQ(difference(full(parts), whole), 0) << to_string(DTensor(parts).placements());
  });
}

TEST(Views, FollowTheirTensor) {
  on_layouts([](const Tensor& whole, const Tensor& parts) {
    const auto run = [](const Tensor& t) {
      const Tensor flat = t.view(-1), row = t[3], corner = row[1][2];
      t.add_(1);
      const Tensor first = (flat * 2).sum() + corner;
      flat.slice(0, 0, 50).zero_();
      row.add_(10);
      t.data().mul_(2);
      return torch::stack({first, flat.sum(), row.norm(), corner + 0, t.sum()});
    };
    const Tensor expected = run(whole);
    EXPECT_LE(difference(full(run(parts)), expected), 1e-2);
    EXPECT_EQ(difference(full(parts), whole), 0);
  });
}

TEST(Views, CostNothingWhileNothingIsWritten) {
  on_ranks(3, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const Tensor parts = chunk_tensor(torch::ones({7, 2}), mesh, {Shard(0)});
    reset_collective_counts();
    const Tensor flat = parts.view(-1);
    EXPECT_EQ(collective_counts().all_gathers, 1);
    EXPECT_EQ((flat + flat.slice(0, 0, 1).sum()).sum().item<float>(), 28);
    flat.mul_(2);
    flat.mul_(2);
    EXPECT_EQ(collective_counts().all_gathers, 1);
    parts.mul_(2);
    EXPECT_EQ(flat.sum().item<float>(), 14 * 8);
    EXPECT_EQ(collective_counts().all_gathers, 2);
  });
}

TEST(Views, SayWhatTheyCannotDo) {
  on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor parts = chunk_tensor(torch::ones({5, 2}), mesh, {Shard(0)});
    EXPECT_THAT(error_of([&] { DTensor(parts[0]).to_local(); }),
                AllOf(HasSubstr("several ranks"), HasSubstr("full_tensor()")));
    EXPECT_EQ(difference(DTensor(parts[0].clone()).to_local(), torch::ones({2})), 0);
    EXPECT_THAT(error_of([&] { parts.view(torch::kByte); }),
                AllOf(HasSubstr("aten::view"), HasSubstr("width")));
    EXPECT_THAT(error_of([&] { parts[7]; }), HasSubstr("out of range"));
    EXPECT_THAT(error_of([&] { parts.view({3, 3}); }), HasSubstr("invalid"));
    EXPECT_THAT(error_of([&] { torch::_foreach_add_({parts, parts[0]}, 1); }),
                HasSubstr("one op would write"));
    EXPECT_EQ(difference(full(parts), torch::ones({5, 2})), 0);
    const Tensor early = parts[0];
    DTensor(parts).to_local().add_(1);
    EXPECT_THAT(error_of([&] { early.sum(); }), HasSubstr("to_local()"));
    const Tensor later = parts[0];
    DTensor::from_local(DTensor(parts).to_local(), mesh, {Shard(0)}, std::vector<int64_t>{5, 2})
        .mul_(1);
    EXPECT_THAT(error_of([&] { later.sum(); }), HasSubstr("to_local()"));
    parts.add_(0);
    EXPECT_EQ(difference(full(later), torch::full({2}, 2.0)), 0);
    EXPECT_EQ(difference(full(parts[0]), torch::full({2}, 2.0)), 0);
    const Tensor partial =
        DTensor::from_local(torch::ones({4}), mesh, {Partial()}, std::vector<int64_t>{4});
    EXPECT_EQ(difference(full(partial[0]), torch::tensor(2.0)), 0);
    EXPECT_NE(error_of([&] { partial[0].add_(1); }), "");
    // Backward of an in-place op on a view strides over memory.
    const Tensor leaf = chunk_tensor(torch::ones({5, 2}), mesh, {Shard(0)}).requires_grad_();
    const Tensor made = leaf * 1;
    made[0].mul_(2);
    EXPECT_THAT(error_of([&] { made.sum().backward(); }), HasSubstr("in-place op on a view"));
  });
}

}  // namespace
}  // namespace fsdp2::testing::dtensor_views
