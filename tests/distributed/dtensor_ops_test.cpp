// Ops that run on parts, against the same ops on whole tensors; and the errors of those that
// cannot.
#include "support/errors.h"
#include "support/ranks.h"
#include "support/tensors.h"

#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <vector>

namespace fsdp2 {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::whole_of;
using torch::Tensor;

/// `x` and `y` of one size, `row` of the last dimension, `one` of a single row, `scalar` of no
/// dimension.
struct Operands {
  Tensor x, y, row, one, scalar;
};
using Op = std::function<Tensor(const Operands&)>;

std::vector<Op> ops() {
  using O = Operands;
  return {
      [](const O& o) { return o.x + o.y; },
      [](const O& o) { return o.x * 2 - o.y / 3 + 1; },
      [](const O& o) { return 1 / o.x; },
      [](const O& o) { return torch::add(o.x, o.y, 0.5); },
      [](const O& o) { return o.x * o.scalar; },
      [](const O& o) { return o.scalar - o.x; },
      [](const O& o) { return torch::where(o.x > o.y, o.x, o.y); },
      [](const O& o) { return torch::where(o.x > 0, o.x, 0.0); },
      [](const O& o) { return torch::lerp(o.x, o.y, 0.25); },
      [](const O& o) { return torch::addcmul(o.x, o.y, o.y, 0.5); },
      [](const O& o) { return torch::maximum(o.x, o.y).clamp(-0.5, 0.5); },
      [](const O& o) { return torch::gelu(o.x.exp().sqrt().tanh()); },
      [](const O& o) { return torch::pow(2.0, o.x) + o.x.pow(2); },
      [](const O& o) { return o.x.masked_fill(o.y > 0, 7.0); },
      [](const O& o) { return (o.x == o.y).logical_or(o.x.isnan()); },
      [](const O& o) { return o.x.clone().add_(o.y).mul_(o.scalar).neg_(); },
      [](const O& o) { return o.x.to(torch::kDouble).to(torch::kBFloat16); },
      [](const O& o) { return torch::zeros_like(o.x).copy_(o.y).fill_(o.scalar); },
      [](const O& o) { return torch::empty_like(o.x).copy_(o.scalar); },
      [](const O& o) {
        return torch::ones_like(o.x) + torch::full_like(o.x, 3) * o.x.new_ones({7, 3});
      },
      [](const O& o) { return o.x.new_zeros({7, 3}) + o.x.new_full({7, 3}, 2); },
      [](const O& o) { return o.x.new_zeros({2, 2}); },
      [](const O& o) { return o.x.t() + o.y.t(); },
      [](const O& o) { return o.x.t().contiguous(); },
      [](const O& o) { return o.x.unsqueeze(0).transpose(0, 2).permute({1, 2, 0}); },
      [](const O& o) { return o.x.view({7, 3}) + o.x.reshape({-1, 3}) + o.x.view_as(o.y); },
      [](const O& o) { return o.x.view({1, 7, 3, 1}); },
      [](const O& o) { return o.x.expand({2, 7, 3}).sum(0); },
      [](const O& o) { return torch::stack({o.x, o.y}, 1); },
      [](const O& o) { return torch::stack({o.x, o.y}, -1).select(2, 1); },
      [](const O& o) { return o.x.detach().alias() * 1; },
      [](const O& o) { return o.x.sum(0) + o.row; },
      [](const O& o) { return o.x + o.row; },
      [](const O& o) { return o.row * o.x; },
      [](const O& o) { return o.x.sub(o.one); },
      [](const O& o) { return o.x.sum() * o.x; },
      [](const O& o) { return o.x / (o.x.norm() + 1e-6); },
      [](const O& o) { return torch::clamp(1 / (o.x.norm() + 1e-6), std::nullopt, 1.0); },
      [](const O& o) { return torch::scalar_tensor(torch::equal(o.x, o.y)); },
      [](const O& o) { return torch::scalar_tensor(torch::equal(o.x, o.x.clone())); },
      [](const O& o) { return torch::scalar_tensor(torch::allclose(o.x, o.x + 1e-9)); },
      [](const O& o) { return o.x.isclose(o.y); },
      [](const O& o) { return torch::cat(torch::_foreach_add({o.x, o.y}, 1), 1); },
      [](const O& o) {
        return torch::_foreach_mul(std::vector<Tensor>{o.x}, std::vector<Tensor>{o.y})[0];
      },
      [](const O& o) { return torch::stack(torch::_foreach_norm({o.x, o.y}, 3)); },
      [](const O& o) { return torch::stack(torch::_foreach_norm({o.x, o.y})).norm(); },
      [](const O& o) {
        std::vector<Tensor> sums = {o.x.clone(), o.x * 2};
        torch::_foreach_addcdiv_(sums, {o.x, o.x}, {o.y, o.y}, 0.1);
        torch::_foreach_mul_(sums, torch::clamp_max(o.x.norm(), 0.5));
        return sums[0] + sums[1];
      },
  };
}

void compare(const DeviceMesh& mesh, const std::vector<Placement>& choices) {
  torch::manual_seed(2);
  const Operands whole{torch::randn({7, 3}), torch::randn({7, 3}), torch::randn({3}),
                       torch::randn({1, 3}), torch::tensor(0.75)};
  for (const Placement& placement : choices) {
    Placements layout(mesh.ndim(), Replicate());
    layout.back() = placement;
    const Placements row(mesh.ndim(), Replicate());
    const auto made = [&](const Tensor& tensor, const Placements& placements) -> Tensor {
      return chunk_tensor(tensor, mesh, placements);
    };
    // The second operand in the same layout, in another, and plain.
    for (const Tensor& y : {made(whole.y, layout), made(whole.y, row), whole.y}) {
      const Operands parts{made(whole.x, layout), y, made(whole.row, row), made(whole.one, row),
                           whole.scalar};
      size_t index = 0;
      for (const Op& op : ops()) {
        std::string failure;
        try {
          const Tensor expected = op(whole);
          const Tensor result = whole_of(op(parts));
          EXPECT_EQ(result.sizes(), expected.sizes()) << "op " << index;
          EXPECT_EQ(result.scalar_type(), expected.scalar_type()) << "op " << index;
          EXPECT_TRUE(torch::allclose(result, expected, 1e-5, 1e-6, true))
              << "op " << index << " as " << placement;
        } catch (const c10::Error& error) {
          failure = error.what_without_backtrace();
        }
        // Lists, stacks and views of a plain tensor do not mix with shards; the whole would do.
        const bool mixes = is_dtensor(y) && DTensor(y).placements() == layout;
        if (mixes || failure.find("different layouts") == std::string::npos) {
          EXPECT_EQ(failure, "") << "op " << index << " as " << placement;
        }
        ++index;
      }
    }
  }
}

TEST(Ops, EqualWholeTensors) {
  for (int world : {1, 2, 3, 4}) {
    testing::on_ranks(
        world, [&](int) { compare(init_device_mesh("cpu", {world}), {Shard(0), Replicate()}); });
  }
  testing::on_ranks(4, [](int) { compare(init_device_mesh("cpu", {2, 2}), {Shard(0)}); });
}

TEST(Ops, CutAlongWholeDimensions) {
  testing::on_ranks(3, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const Tensor whole = torch::arange(28).view({7, 4});
    const Tensor parts = chunk_tensor(whole, mesh, {Shard(0)});
    EXPECT_TRUE(torch::equal(whole_of(parts.narrow(1, 1, 2)), whole.narrow(1, 1, 2)));
    EXPECT_TRUE(torch::equal(whole_of(parts.select(1, -1)), whole.select(1, -1)));
    EXPECT_TRUE(torch::equal(whole_of(parts.slice(1, 0, 4, 2)), whole.slice(1, 0, 4, 2)));
    EXPECT_TRUE(torch::equal(whole_of(parts.split(3, 1)[1]), whole.split(3, 1)[1]));
    EXPECT_TRUE(torch::equal(whole_of(parts.unbind(1)[2]), whole.unbind(1)[2]));
    EXPECT_TRUE(torch::equal(whole_of(std::get<0>(parts.max(1))), std::get<0>(whole.max(1))));
    EXPECT_TRUE(torch::equal(whole_of(std::get<1>(parts.min(1))), std::get<1>(whole.min(1))));
    EXPECT_TRUE(
        torch::equal(whole_of(torch::cat({parts, parts}, 1)), torch::cat({whole, whole}, 1)));
  });
}

TEST(Ops, UnknownOnesNameOpAndRemedy) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor parts = chunk_tensor(torch::ones({4, 4}), mesh, {Shard(0)});
    for (const auto& [name, run] : std::vector<std::pair<std::string, std::function<void()>>>{
             {"aten::_pdist_forward", [&] { torch::pdist(parts); }},
             {"aten::", [&] { torch::nn::functional::linear(torch::ones({2, 4}), parts); }},
             {"aten::resize_", [&] { parts.resize_({2, 2}); }},
             {"aten::as_strided", [&] { parts.as_strided({2, 2}, {1, 1}); }},
             {"aten::squeeze_", [&] { parts.clone().squeeze_(); }},
             {"aten::_fft_r2c", [&] { torch::fft::rfft(parts); }},
             {"aten::index", [&] { parts.index({torch::tensor({0, 1})}); }}}) {
      EXPECT_THAT(error_of(run),
                  AllOf(HasSubstr(name), HasSubstr("[4, 4]"), HasSubstr("full_tensor()"),
                        HasSubstr("to_local()"), HasSubstr("redistribute()")));
    }
  });
}

TEST(Ops, PlainOperandsHaveTheGlobalSize) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor whole = torch::arange(10).view({5, 2}).to(torch::kFloat);
    Tensor parts = chunk_tensor(torch::zeros({5, 2}), mesh, {Shard(0)});
    parts.copy_(whole);
    EXPECT_TRUE(torch::equal(whole_of(parts), whole));
    parts.add_(whole).mul_(2);
    EXPECT_TRUE(torch::equal(whole_of(parts), whole * 4));
    for (const Tensor& wrong : {torch::ones_like(DTensor(parts).to_local()), torch::ones({2}),
                                torch::ones({1}), torch::ones({5, 1})}) {
      for (const auto& run : std::vector<std::function<void()>>{
               [&] { parts.copy_(wrong); }, [&] { parts + wrong; }, [&] { parts.mul_(wrong); },
               [&] { torch::where(parts > 0, parts, wrong); }}) {
        EXPECT_THAT(error_of(run),
                    AllOf(HasSubstr("aten::"), HasSubstr("[5, 2]"), HasSubstr("from_local")));
      }
    }
    EXPECT_THAT(error_of([&] { parts.set_(torch::ones({3, 2})); }), HasSubstr("aten::set_"));
    EXPECT_THAT(error_of([&] { parts.set_(torch::ones({5, 2}, torch::kDouble)); }),
                HasSubstr("double"));
    Tensor plain = torch::zeros({5, 2});
    EXPECT_THAT(error_of([&] { plain.add_(parts); }), HasSubstr("full_tensor()"));
    EXPECT_THAT(error_of([&] { plain.copy_(parts); }), HasSubstr("full_tensor()"));
    plain.copy_(DTensor(parts).redistribute({Replicate()}));
    EXPECT_TRUE(torch::equal(plain, whole * 4));
    EXPECT_TRUE(torch::equal(whole_of(parts), whole * 4)) << "a refused op wrote";
    for (const Tensor& differentiable : {torch::ones({5, 2}), torch::tensor(1.0f)}) {
      EXPECT_THAT(error_of([&] { parts + differentiable.requires_grad_(); }),
                  HasSubstr("requires grad"));
    }
  });
}

TEST(Ops, PartialsAreNotWritten) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor parts = chunk_tensor(torch::ones({5}), mesh, {Shard(0)});
    Tensor sum = parts.sum();
    sum.mul_(2).add_(parts.sum());
    EXPECT_EQ(sum.item<float>(), 15);
    sum.zero_();
    EXPECT_EQ(sum.item<float>(), 0) << "the kept value was not dropped";
    const Tensor alias = sum.detach();
    EXPECT_THAT(error_of([&] { sum.add_(1); }), HasSubstr("not reduced"));
    Tensor norm = parts.norm();
    norm.clamp_min_(3).add_(1);  // nobody else holds its parts: reduced, then written
    EXPECT_EQ(norm.item<float>(), 4);
    EXPECT_EQ(DTensor(norm).placements(), Placements{Replicate()});
  });
}

TEST(Ops, DecisionsAgreeOnAllRanks) {
  testing::on_ranks(3, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const Tensor whole = torch::ones({7});
    const Tensor a = chunk_tensor(whole, mesh, {Shard(0)});
    Tensor changed = whole.clone();
    changed[0] = 2;  // on the first rank only
    EXPECT_FALSE(torch::equal(a, chunk_tensor(changed, mesh, {Shard(0)})));
    EXPECT_FALSE(torch::equal(a, changed));
    EXPECT_TRUE(torch::equal(a, whole));
    EXPECT_FALSE(torch::allclose(a, chunk_tensor(changed, mesh, {Shard(0)})));
    EXPECT_EQ(chunk_tensor(torch::full({1}, 3.0), mesh, {Shard(0)}).item<double>(), 3);
    EXPECT_THROW(a.item(), c10::Error);
    const Tensor grad = chunk_tensor(torch::ones({7}), mesh, {Shard(0)});
    if (rank == 2) DTensor(grad).to_local().fill_(std::numeric_limits<float>::infinity());
    Tensor found = torch::zeros({1});
    std::vector<Tensor> grads = {grad};
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found, torch::full({1}, 0.5f));
    EXPECT_EQ(found.item<float>(), 1);
    EXPECT_EQ(DTensor(grad).to_local()[0].item<float>(),
              rank == 2 ? std::numeric_limits<float>::infinity() : 0.5f);
  });
}

TEST(Random, DrawsWhatOneProcessWould) {
  for (int world : {1, 3}) {
    testing::on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      const std::vector<std::function<void(Tensor)>> draws = {
          [](Tensor t) { torch::nn::init::normal_(t, 1, 2); },
          [](Tensor t) { torch::nn::init::xavier_uniform_(t); },
          [](Tensor t) { torch::nn::init::kaiming_normal_(t); },
          [](Tensor t) { t.bernoulli_(0.5); },
          [](Tensor t) { t.copy_(torch::randn_like(t) + torch::rand_like(t)); }};
      for (const auto& draw : draws) {
        Tensor whole = torch::zeros({7, 4});
        Tensor parts = chunk_tensor(whole, mesh, {Shard(0)}).requires_grad_();
        torch::manual_seed(11);
        draw(whole);
        torch::manual_seed(11);
        torch::NoGradGuard no_grad;
        draw(parts);
        EXPECT_TRUE(torch::equal(whole_of(parts), whole));
      }
    });
  }
}

TEST(Random, ReplicasAgreeWhateverTheirSeeds) {
  testing::on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    torch::manual_seed(rank);
    const Tensor parts = chunk_tensor(torch::zeros({3, 2}), mesh, {Replicate(), Shard(0)});
    parts.normal_();
    const Tensor local = DTensor(parts).to_local();
    const Tensor all =
        DTensor::from_local(local, mesh, {Partial("max"), Shard(0)}, std::vector<int64_t>{3, 2})
            .full_tensor();
    EXPECT_TRUE(torch::equal(all, DTensor(parts).full_tensor()));
    EXPECT_TRUE(torch::equal(
        DTensor::from_local(local, mesh, {Partial("min"), Shard(0)}, std::vector<int64_t>{3, 2})
            .full_tensor(),
        all));
  });
}

}  // namespace
}  // namespace fsdp2
