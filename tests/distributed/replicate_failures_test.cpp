// What replicated modules refuse, and what is left after an error.

#include "support/errors.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/shared_outcomes.h"
#include "support/twins.h"

namespace fsdp2::testing::replicate_failures {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}
Tensor loss(TwoLinear& module, int rank) { return module->forward(input(rank)).pow(2).sum(); }

struct Throw : torch::autograd::Function<Throw> {
  static Tensor forward(AutogradContext*, const Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("the user's own error");
  }
};

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Tensor forward(AutogradContext* context, const Tensor& x, TwoLinear* module) {
    context->save_for_backward({x});
    context->saved_data["module"] = reinterpret_cast<int64_t>(module);
    const torch::NoGradGuard no_grad;
    return (*module)->forward(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    auto* module = reinterpret_cast<TwoLinear*>(context->saved_data["module"].toInt());
    Tensor y;
    {
      const torch::AutoGradMode enabled(true);
      y = (*module)->forward(x);
    }
    y.backward(gradients[0]);
    return {x.grad(), Tensor()};
  }
};

/// Steps that must be right after what came before.
void expect_right_steps(Twins<TwoLinear>& twins) {
  for (int step = 0; step < 3; ++step) {
    twins.zero_grad();
    twins.backward(loss);
    twins.expect_same(2e-5);
  }
}

class ReplicateFailures : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ReplicateFailures, ::testing::Values(1, 2, 3));

TEST_P(ReplicateFailures, UnusedParameterIsNamedOnAllRanks) {
  on_ranks(GetParam(), [](int rank) {
    Twins<TwoLinear> twins;
    replicate(twins.sharded);
    for (bool everywhere : {true, false}) {
      for (int attempt = 0; attempt < 2; ++attempt) {
        const std::string error = error_of([&] {
          const Tensor hidden = twins.sharded->a(input(rank));
          (everywhere || rank == 0 ? hidden : twins.sharded->b(hidden)).sum().backward();
        });
        EXPECT_THAT(error, AllOf(HasSubstr("'b.weight', 'b.bias'"),
                                 HasSubstr("find_unused_parameters"), Not(HasSubstr("'a."))));
        twins.sharded->zero_grad();
      }
    }
    expect_right_steps(twins);
  });
}

TEST_P(ReplicateFailures, FailedBackwardLeavesNothingBehind) {
  on_ranks(GetParam(), [](int rank) {
    Twins<TwoLinear> twins;
    ReplicateOptions options;
    options.bucket_cap_mb = 1e-5;
    replicate(twins.sharded, options);
    for (int step = 0; step < 2; ++step) {
      const auto fail = [&] {
        const Tensor hidden = Throw::apply(twins.sharded->a(input(rank)));
        twins.sharded->b(hidden).sum().backward();
      };
      EXPECT_THAT(error_of(fail), HasSubstr("the user's own error"));
      expect_right_steps(twins);
    }
  });
}

TEST_P(ReplicateFailures, FailureOnOneRankIsAnErrorOnAllAndTheNextStepIsRight) {
  on_ranks(GetParam(), [](int rank) {
    for (double cap : {25.0, 1e-5}) {
      Twins<TwoLinear> twins;
      ReplicateOptions options;
      options.bucket_cap_mb = cap;
      replicate(twins.sharded, options);
      for (bool after_all : {false, true}) {
        const auto fail = [&] {
          Tensor x = input(rank).requires_grad_();
          Tensor hidden = twins.sharded->a(after_all && rank == 0 ? Throw::apply(x) : x);
          if (!after_all && rank == 0) hidden = Throw::apply(hidden);
          twins.sharded->b(hidden).sum().backward();
        };
        EXPECT_THAT(error_of(fail), HasSubstr(rank == 0 ? "the user's own error"
                                                        : "backward failed on another rank"));
        expect_right_steps(twins);
      }
    }
  });
}

TEST(ReplicateTimeout, RankWithoutBackwardIsAnErrorOnTheOthers) {
  SharedOutcomes failed(2);
  on_ranks(
      2,
      [&](int rank) {
        ReplicateOptions options;
        options.mesh = DeviceMesh::from_group(
            new_group({0, 1}, "impatient", std::chrono::milliseconds(2000)), c10::kCPU);
        TwoLinear module;
        replicate(module, options);
        if (rank == 0) {
          const std::string error = error_of([&] { loss(module, rank).backward(); });
          EXPECT_THAT(error, HasSubstr("did every rank run backward?"));
          failed.set(rank, !error.empty());
        } else {
          std::this_thread::sleep_for(std::chrono::seconds(4));
        }
        failed.leave();
      },
      std::chrono::seconds(20));
  EXPECT_EQ(failed.get(0), 1);
}

TEST_P(ReplicateFailures, CheckpointByACustomFunction) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    replicate(twins.sharded);
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward([](TwoLinear& module, int rank) {
        return Checkpoint::apply(input(rank).requires_grad_(), &module).pow(2).sum();
      });
      twins.expect_same(2e-5);
    }
    const auto twice = [&] {
      const Tensor x = input(0).requires_grad_();
      const Tensor y = Checkpoint::apply(x, &twins.sharded);
      Checkpoint::apply(y, &twins.sharded).sum().backward();
    };
    EXPECT_THAT(error_of(twice), HasSubstr("got gradients twice"));
    expect_right_steps(twins);
  });
}

TEST_P(ReplicateFailures, AStaticGraphMayGiveGradientsTwice) {
  on_ranks(GetParam(), [](int) {
    for (const bool view : {false, true}) {
      Twins<TwoLinear> twins;
      ReplicateOptions options;
      options.static_graph = true;
      options.gradient_as_bucket_view = view;
      options.bucket_cap_mb = 1e-5;
      replicate(twins.sharded, options);
      for (int step = 0; step < 3; ++step) {
        twins.zero_grad();
        twins.backward([](TwoLinear& module, int rank) {
          const Tensor x = input(rank).requires_grad_();
          const Tensor y = Checkpoint::apply(x, &module);
          return (Checkpoint::apply(y, &module) + module->a(x)).pow(2).sum();
        });
        twins.expect_same(2e-4);
      }
    }
  });
}

TEST_P(ReplicateFailures, AStaticGraphIsThatOfTheFirstBackward) {
  on_ranks(GetParam(), [](int rank) {
    for (const bool all_at_first : {false, true}) {
      for (const double cap : {25.0, 1e-5}) {
        Twins<TwoLinear> twins;
        ReplicateOptions options;
        options.static_graph = true;
        options.bucket_cap_mb = cap;
        replicate(twins.sharded, options);
        const auto loss_of = [](bool all) {
          return [all](TwoLinear& module, int r) {
            return all ? loss(module, r) : module->a(input(r)).pow(2).sum();
          };
        };
        const auto train = [&] {
          for (int step = 0; step < 2; ++step) {
            twins.zero_grad();
            twins.backward(loss_of(all_at_first));
            twins.expect_same(2e-5);
          }
        };
        train();
        const bool deviates = rank == 0;
        const std::string error =
            error_of([&] { loss_of(all_at_first != deviates)(twins.sharded, rank).backward(); });
        EXPECT_THAT(error, deviates ? AllOf(HasSubstr("static_graph is set, but"), HasSubstr("'b."),
                                            Not(HasSubstr("'a.")))
                                    : AllOf(HasSubstr("backward failed on another rank"),
                                            HasSubstr("zero_grad"), Not(HasSubstr("'b."))));
        train();
      }
    }
  });
}

TEST_P(ReplicateFailures, CastAfterwardsIsAnError) {
  on_ranks(GetParam(), [](int rank) {
    TwoLinear module;
    replicate(module);
    module->to(torch::kDouble);
    EXPECT_THAT(error_of([&] { module->forward(input(rank).to(torch::kDouble)).sum().backward(); }),
                HasSubstr("was moved or cast after replicate()"));
  });
}

TEST_P(ReplicateFailures, RanksThatDisagreeAreToldSo) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP();
  on_ranks(world, [&](int rank) {
    const bool odd = rank == world - 1;
    const std::string last = "where rank " + std::to_string(world - 1) + " has ";
    const auto refuse = [&](const torch::nn::Sequential& module, const ReplicateOptions& options,
                            const std::string& text) {
      const auto before = module->parameters()[0].detach().clone();
      EXPECT_THAT(error_of([&] { replicate(module.ptr(), options); }), HasSubstr(text));
      EXPECT_FALSE(is_replicated(*module));
      EXPECT_EQ(difference(module->parameters()[0], before), 0) << "changed although refused";
    };
    torch::nn::Sequential shape(torch::nn::Linear(5, odd ? 4 : 3));
    refuse(shape, {},
           "rank 0 has parameter '0.weight' (Float [3, 5]) " + last +
               "parameter '0.weight' (Float [4, 5])");
    torch::nn::Sequential dtype(torch::nn::Linear(5, 3));
    if (odd) dtype->to(torch::kDouble);
    refuse(dtype, {}, last + "parameter '0.weight' (Double [3, 5])");
    torch::nn::Sequential frozen(torch::nn::Linear(5, 3));
    if (odd) frozen->parameters()[1].set_requires_grad(false);
    refuse(frozen, {}, last + "parameter '0.bias' (Float [3], frozen)");
    torch::nn::Sequential more(torch::nn::Linear(5, 3));
    if (odd) more->push_back(torch::nn::Linear(3, 2));
    refuse(more, {}, last + "parameter '1.weight'");
    torch::nn::Sequential same(torch::nn::Linear(5, 3));
    ReplicateOptions options;
    options.find_unused_parameters = odd;
    refuse(same, options, "option find_unused_parameters");
    ReplicateOptions unknown;
    if (odd) unknown.ignored_parameters = {"nothing"};
    refuse(same, unknown, "there is no parameter 'nothing' to ignore (rank ");
    replicate(same.ptr());
  });
}

TEST_P(ReplicateFailures, RefusedModulesAndMeshes) {
  const int world = GetParam();
  on_ranks(world, [&](int) {
    const auto error = [](const auto& module, const ReplicateOptions& options = {}) {
      return error_of([&] { replicate(module, options); });
    };
    TwoLinear module;
    ReplicateOptions options;
    options.mesh = init_device_mesh("cpu", {1, world}, {"a", "b"});
    EXPECT_THAT(error(module, options), HasSubstr("must be 1-D"));
    options.mesh = options.mesh["b"];
    options.bucket_cap_mb = 0;
    EXPECT_THAT(error(module, options), HasSubstr("bucket_cap_mb must be positive"));
    options.bucket_cap_mb = 1;
    EXPECT_EQ(error(module, options), "");
    EXPECT_THAT(error(module, options), HasSubstr("is replicated already"));

    TwoLinear sharded;
    fully_shard(sharded);
    EXPECT_THAT(error(sharded), HasSubstr("is a DTensor"));
    torch::nn::Embedding sparse(torch::nn::EmbeddingOptions(4, 3).sparse(true));
    EXPECT_THAT(error(sparse), HasSubstr("makes sparse gradients"));
    TwoLinear frozen;
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    EXPECT_THAT(error(frozen), HasSubstr("requires grad"));
    EXPECT_THAT(error_of([&] { as_replicated(*frozen); }), HasSubstr("was not called on this"));
  });
}

TEST_P(ReplicateFailures, HandleAndModuleMayGoInAnyOrder) {
  on_ranks(GetParam(), [](int rank) {
    std::optional<ReplicatedModule> replica;
    for (int round = 0; round < 3; ++round) {
      Twins<TwoLinear> twins;
      replica = replicate(twins.sharded);
      EXPECT_TRUE(is_replicated(*twins.sharded));
      expect_right_steps(twins);
    }
    EXPECT_THAT(error_of([&] { replica->sync_buffers(); }), HasSubstr("is gone"));
    Tensor graph;
    {
      TwoLinear module;
      replicate(module);
      graph = loss(module, rank);
    }
    graph.backward();
    Twins<TwoLinear> twins;
    replicate(twins.sharded);
    expect_right_steps(twins);
  });
}

}  // namespace
}  // namespace fsdp2::testing::replicate_failures
