// Parameters as one vector: torch::nn::utils, and LBFGS, which works on it.
#include "support/errors.h"
#include "support/ranks.h"
#include "support/tensors.h"
#include "support/twins.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <vector>

namespace fsdp2::testing::flattened_parameters {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

/// The same values whole and sharded, in layouts that differ.
struct Parameters {
  std::vector<Tensor> whole, parts;
  explicit Parameters(const DeviceMesh& mesh) {
    torch::manual_seed(3);
    const std::vector<std::vector<int64_t>> sizes = {{7, 3}, {5}, {1, 4}, {3, 2, 2}, {}};
    for (size_t i = 0; i < sizes.size(); ++i) {
      Placements placements(mesh.ndim(), Shard(0));
      if (i == 2) placements.back() = Shard(1);
      if (sizes[i].empty()) placements.assign(mesh.ndim(), Replicate());
      whole.push_back(torch::randn(sizes[i]).requires_grad_());
      parts.push_back(chunk_tensor(whole.back().detach(), mesh, placements).requires_grad_());
    }
  }
  void expect_same(double bound) const {
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_LE(difference(full(parts[i]), whole[i]), bound) << i;
    }
  }
};

void on_meshes(const std::function<void(const DeviceMesh&)>& body) {
  for (const int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](int) { body(init_device_mesh("cpu", {world})); });
  }
  on_ranks(4, [&](int) { body(init_device_mesh("cpu", {2, 2})); });
}

TEST(FlattenedParameters, ToVectorAndBack) {
  on_meshes([](const DeviceMesh& mesh) {
    Parameters p(mesh);
    const Tensor expected = torch::nn::utils::parameters_to_vector(p.whole);
    const Tensor vector = torch::nn::utils::parameters_to_vector(p.parts);
    EXPECT_EQ(vector.sizes(), expected.sizes());
    EXPECT_EQ(difference(full(vector), expected), 0);
    EXPECT_EQ(
        difference(full(torch::nn::utils::parameters_to_vector({p.parts[0]})), p.whole[0].view(-1)),
        0);
    const auto places = [&] {
      std::vector<Placements> all;
      for (const Tensor& part : p.parts) all.push_back(DTensor(part).placements());
      return all;
    };
    const auto before = places();
    torch::nn::utils::vector_to_parameters((vector * 2).detach(), p.parts);
    torch::nn::utils::vector_to_parameters((expected * 2).detach(), p.whole);
    p.expect_same(0);
    torch::nn::utils::vector_to_parameters((expected * 3).detach(), p.parts);  // a plain vector
    torch::nn::utils::vector_to_parameters((expected * 3).detach(), p.whole);
    p.expect_same(0);
    EXPECT_EQ(places(), before);
    for (const Tensor& part : p.parts) EXPECT_TRUE(part.requires_grad() && part.is_leaf());
  });
}

TEST(FlattenedParameters, ToVectorIsDifferentiable) {
  on_meshes([](const DeviceMesh& mesh) {
    Parameters p(mesh);
    for (const auto* parameters : {&p.whole, &p.parts}) {
      const Tensor vector = torch::nn::utils::parameters_to_vector(*parameters);
      (vector.pow(2).sum() + vector.dot(vector) + vector.slice(0, 3, 20).norm()).backward();
    }
    for (size_t i = 0; i < p.whole.size(); ++i) {
      EXPECT_LE(difference(full(p.parts[i].grad()), p.whole[i].grad()), 1e-5) << i;
      EXPECT_EQ(DTensor(p.parts[i].grad()).placements(), DTensor(p.parts[i]).placements());
    }
  });
}

TEST(FlattenedParameters, OfAWrappedModule) {
  for (const int world : {1, 2, 3}) {
    on_ranks(world, [](int) {
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, /*apart=*/true);
      const Tensor vector = torch::nn::utils::parameters_to_vector(twins.sharded->parameters());
      const Tensor expected = torch::nn::utils::parameters_to_vector(twins.plain->parameters());
      EXPECT_EQ(difference(full(vector), expected), 0);
      torch::nn::utils::vector_to_parameters((vector * 2).detach(), twins.sharded->parameters());
      torch::nn::utils::vector_to_parameters((expected * 2).detach(), twins.plain->parameters());
      twins.expect_same(0, false);
      const Tensor x = torch::ones({2, 5});
      EXPECT_LE(difference(twins.sharded->forward(x), twins.plain->forward(x)), 1e-6)
          << "forward used what was gathered before";
    });
  }
}

TEST(FlattenedParameters, PlainAndShardedDoNotJoin) {
  on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor part = chunk_tensor(torch::ones({5}), mesh, {Shard(0)});
    EXPECT_THAT(error_of([&] { torch::nn::utils::parameters_to_vector({part, torch::ones({2})}); }),
                AllOf(HasSubstr("aten::cat"), HasSubstr("distribute_tensor")));
    EXPECT_THAT(error_of([&] { part.set_data(torch::ones({3})); }),
                AllOf(HasSubstr("[5]"), HasSubstr("[3]"), HasSubstr("from_local")));
    EXPECT_EQ(difference(full(part), torch::ones({5})), 0);
  });
}

/// Rosenbrock's function over a parameter's neighbours, and squares: curved in every direction.
Tensor curved(const std::vector<Tensor>& p) {
  Tensor loss = (p[0] - 1).pow(2).sum() + (p[1] * p[1] - 2).pow(2).sum();
  loss = loss + (p[2].exp() - p[2]).sum() + (p[3] - 0.3).pow(4).sum() + (p[0].sum() - 3).pow(2);
  return loss + (p[4] - 2).pow(2);
}

TEST(Lbfgs, StepsOnShardsAsOnWholeParameters) {
  on_meshes([](const DeviceMesh& mesh) {
    for (const bool search : {false, true}) {
      Parameters p(mesh);
      auto options = torch::optim::LBFGSOptions(0.3).max_iter(5).history_size(4);
      if (search) options.line_search_fn("strong_wolfe");
      double losses[2] = {0, 0};
      for (const bool sharded : {false, true}) {
        const auto& parameters = sharded ? p.parts : p.whole;
        torch::optim::LBFGS optimizer(parameters, options);
        for (int step = 0; step < 4; ++step) {
          const Tensor loss = optimizer.step([&] {
            optimizer.zero_grad();
            Tensor value = curved(parameters);
            value.backward();
            return value;
          });
          losses[sharded] = loss.item<double>();
        }
      }
      EXPECT_NEAR(losses[1], losses[0], 1e-3 * (1 + std::abs(losses[0])));
      p.expect_same(mesh.size() == 1 ? 0 : 2e-3);
      EXPECT_LT(curved(p.parts).item<double>(), losses[0] + 1e-3);
    }
  });
}

TEST(Lbfgs, TrainsAWrappedModule) {
  for (const int world : {1, 2, 3}) {
    on_ranks(world, [](int) {
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, /*apart=*/false);
      const auto options = torch::optim::LBFGSOptions(0.1).max_iter(3);
      torch::optim::LBFGS plain(twins.plain->parameters(), options);
      torch::optim::LBFGS sharded(twins.sharded->parameters(), options);
      torch::manual_seed(5);
      const Tensor x = torch::randn({4, 5});
      for (int step = 0; step < 3; ++step) {
        const auto closure = [&](TwoLinear& module) {
          module->zero_grad();
          Tensor loss = module->forward(x).pow(2).mean();
          loss.backward();
          return loss;
        };
        plain.step([&] { return closure(twins.plain); });
        sharded.step([&] { return closure(twins.sharded); });
      }
      twins.expect_same(1e-5, false);
    });
  }
}

}  // namespace
}  // namespace fsdp2::testing::flattened_parameters
