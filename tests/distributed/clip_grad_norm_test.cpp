// fsdp2::clip_grad_norm_ over meshes, dtypes and ranks.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/training.h"

namespace fsdp2::testing::clip_grad_norm {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

Tensor with_gradient(Tensor parameter, Tensor gradient) {
  parameter.requires_grad_();
  parameter.mutable_grad() = std::move(gradient);
  return parameter;
}

/// Lays a tensor out as one of the two parameters.
using Lay = std::function<Tensor(const Tensor&)>;

/// a[9] and b[16], gradients all ones.
void expect_global(const Lay& a, const Lay& b) {
  const auto fresh = [&]() -> std::vector<Tensor> {
    return {with_gradient(a(torch::zeros({9})), a(torch::ones({9}))),
            with_gradient(b(torch::zeros({16})), b(torch::ones({16})))};
  };
  const std::vector<std::pair<double, double>> norms = {
      {1, 25}, {2, 5}, {3, 2.924018}, {0.5, 625}, {kInf, 1}};
  for (const auto& [order, expected] : norms) {
    auto parameters = fresh();
    EXPECT_NEAR(clip_grad_norm_(parameters, kInf, order), expected, 1e-6) << order;
    EXPECT_NEAR(clip_grad_norm_(parameters, 1000, order, true), expected, 1e-6) << order;
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(torch::equal(full(parameter.grad()), torch::ones(parameter.sizes())));
    }
  }
  auto parameters = fresh();
  EXPECT_NEAR(clip_grad_norm_(parameters, 1), 5, 1e-6);
  for (const auto& parameter : parameters) {
    EXPECT_LE(difference(full(parameter.grad()), torch::full(parameter.sizes(), 0.2)), 1e-6);
  }
  parameters[1].mutable_grad().reset();
  EXPECT_NEAR(clip_grad_norm_(parameters, 10), 0.6, 1e-6);
  parameters[0].mutable_grad().reset();
  EXPECT_EQ(clip_grad_norm_(parameters, 10), 0);
  EXPECT_EQ(clip_grad_norm_({}, 10), 0);
}

Lay chunks(const DeviceMesh& mesh, const Placements& placements) {
  return [=](const Tensor& tensor) -> Tensor { return chunk_tensor(tensor, mesh, placements); };
}
Tensor plain(const Tensor& tensor) { return tensor.clone(); }

TEST(ClipGradNorm, IsGlobalInEveryMesh) {
  for (int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      const Lay sharded = chunks(mesh, {Shard(0)});
      expect_global(sharded, sharded);
      expect_global(sharded, plain);
      expect_global(sharded, chunks(mesh, {Replicate()}));
      expect_global(plain, plain);
    });
  }
  on_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    const std::vector<Lay> lays = {plain,
                                   chunks(mesh, {Replicate(), Shard(0)}),
                                   chunks(mesh, {Shard(0), Replicate()}),
                                   chunks(mesh, {Shard(0), Shard(0)}),
                                   chunks(mesh, {Replicate(), Replicate()}),
                                   chunks(mesh["dp"], {Shard(0)}),
                                   chunks(mesh["tp"], {Shard(0)})};
    for (const Lay& a : lays) {
      for (const Lay& b : lays) expect_global(a, b);
    }
  });
}

TEST(ClipGradNorm, CostsOneCollectiveAMesh) {
  for (int world : {2, 4}) {
    on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world}),
                       pair = init_device_mesh("cpu", {2, world / 2}, {"r", "s"});
      for (size_t count : {1, 5}) {
        std::vector<Tensor> parameters;
        const auto add = [&](const DeviceMesh& on, const Placements& placements) {
          for (size_t i = 0; i < count; ++i) {
            parameters.push_back(with_gradient(chunk_tensor(torch::zeros({7}), on, placements),
                                               chunk_tensor(torch::ones({7}), on, placements)));
          }
        };
        add(mesh, {Shard(0)});
        for (double order : {2.0, kInf}) {
          reset_collective_counts();
          clip_grad_norm_(parameters, 1, order);
          EXPECT_EQ(collective_counts().all_reduces, 1);
        }
        add(pair, {Replicate(), Shard(0)});
        add(mesh, {Replicate()});
        reset_collective_counts();
        clip_grad_norm_(parameters, 1);
        const CollectiveCounts counts = collective_counts();
        EXPECT_EQ(counts.all_reduces, world == 4 ? 2 : 1);
        EXPECT_EQ(counts.all_gathers + counts.others + counts.broadcasts, 0);
      }
    });
  }
}

TEST(ClipGradNorm, EqualsTheUnshardedOneInEveryDtype) {
  for (int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](int) {
      torch::manual_seed(3);
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      std::vector<Tensor> wholes, shards;
      for (auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
        for (int64_t rows : {70, 1, 33}) {
          const Tensor gradient = torch::randn({rows, 50}).to(dtype);
          wholes.push_back(with_gradient(torch::zeros_like(gradient).to(torch::kDouble),
                                         gradient.to(torch::kDouble)));
          shards.push_back(
              with_gradient(chunk_tensor(torch::zeros_like(gradient), mesh, {Shard(0)}),
                            chunk_tensor(gradient, mesh, {Shard(0)})));
        }
      }
      for (double order : {1.0, 2.0, 3.5, kInf}) {
        const double expected = torch::nn::utils::clip_grad_norm_(wholes, 1e9, order);
        EXPECT_NEAR(clip_grad_norm_(shards, kInf, order) / expected, 1, 3e-6) << order;
      }
      torch::nn::utils::clip_grad_norm_(wholes, 0.5);
      clip_grad_norm_(shards, 0.5);
      for (size_t i = 0; i < wholes.size(); ++i) {
        const double relative = shards[i].scalar_type() == torch::kBFloat16 ? 1e-2 : 2e-3;
        EXPECT_TRUE(torch::allclose(full(shards[i].grad()).to(torch::kDouble), wholes[i].grad(),
                                    relative, 1e-6));
      }
    });
  }
}

TEST(ClipGradNorm, SixteenBitGradientsDoNotOverflowOrStall) {
  on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const auto norm = [&](torch::ScalarType dtype, double value, int64_t size) {
      const Tensor gradient = torch::full({size}, value, torch::dtype(dtype));
      return clip_grad_norm_(
          {with_gradient(chunk_tensor(torch::zeros_like(gradient), mesh, {Shard(0)}),
                         chunk_tensor(gradient, mesh, {Shard(0)}))},
          kInf);
    };
    EXPECT_NEAR(norm(torch::kHalf, 30000, 10000), 3e6, 1e2);     // beyond what float16 holds
    EXPECT_NEAR(norm(torch::kBFloat16, 1, 1000000), 1000, 0.1);  // a bf16 sum stops at 256
  });
}

TEST(ClipGradNorm, NonFiniteNormsAgreeOnAllRanks) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      for (double bad : {kInf, kNan}) {
        for (double order : {1.0, 2.0, kInf}) {
          Tensor gradient = torch::ones({7});
          gradient[6] = bad;  // on the last rank only
          const auto parameter = with_gradient(chunk_tensor(torch::zeros({7}), mesh, {Shard(0)}),
                                               chunk_tensor(gradient, mesh, {Shard(0)}));
          const double norm = clip_grad_norm_({parameter}, kInf, order);
          EXPECT_TRUE(std::isnan(bad) ? std::isnan(norm) : norm == kInf) << bad << ' ' << order;
          EXPECT_THAT(error_of([&] { clip_grad_norm_({parameter}, 1, order, true); }),
                      HasSubstr("cannot be clipped"));
          EXPECT_EQ(full(parameter.grad())[0].item<float>(), 1) << "changed although refused";
        }
      }
    });
  }
}

TEST(ClipGradNorm, RefusesWhatItCannotMeasure) {
  on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const auto error = [](const Tensor& parameter, double max_norm = 1, double order = 2) {
      return error_of([&] { clip_grad_norm_({parameter}, max_norm, order); });
    };
    const Tensor good = with_gradient(torch::zeros({3}), torch::ones({3}));
    EXPECT_THAT(error(good, -1), HasSubstr("max_norm must not be negative"));
    EXPECT_THAT(error(good, kNan), HasSubstr("max_norm must not be negative"));
    EXPECT_THAT(error(good, 1, 0), HasSubstr("norm_type must be positive"));
    EXPECT_THAT(error(with_gradient(torch::zeros({3}), torch::ones({3}).to_sparse())),
                HasSubstr("make it dense"));
    const Tensor partial = DTensor::from_local(torch::ones({3}), mesh, {Partial()});
    EXPECT_THAT(error(with_gradient(chunk_tensor(torch::zeros({3}), mesh, {Replicate()}), partial)),
                HasSubstr("redistribute() it"));
  });
}

}  // namespace
}  // namespace fsdp2::testing::clip_grad_norm
