// What autograd offers beyond one backward: second derivatives, graphs kept, anomaly mode, forward
// mode, inference mode, views and saved tensors that live across a reshard.

#include "support/ranks.h"
#include "support/twins.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/forward_grad.h>

namespace fsdp2::testing::autograd_features {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class AutogradFeatures : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, AutogradFeatures, ::testing::Values(1, 2));

void free_all(TwoLinear& module) {
  if (!is_fsdp(*module)) return;
  for (const auto& below : module->modules()) {
    if (is_fsdp(*below)) as_fsdp(*below).reshard();
  }
}

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}

/// `loss` of the plain module and of the sharded one have the same gradients, twice.
void expect_same_loss(const std::function<Tensor(TwoLinear&, const Tensor& x)>& loss,
                      double bound = 2e-5) {
  for (bool apart : {false, true}) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, apart);
    for (int step = 0; step < 2; ++step) {
      twins.backward([&](TwoLinear& m, int r) {
        Tensor value = loss(m, input(r));
        free_all(m);
        return value;
      });
      twins.expect_same(get_world_size() == 1 ? 0 : bound);
    }
  }
}

TEST_P(AutogradFeatures, SecondDerivatives) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss([](TwoLinear& m, const Tensor& x) {
      Tensor y = m->forward(x).sum();
      Tensor gradient = torch::autograd::grad({y}, {m->a->weight}, {}, true, true)[0];
      return gradient.pow(2).sum() + y;
    });
    expect_same_loss(
        [](TwoLinear& m, const Tensor& x) {
          Tensor at = x.clone().requires_grad_();
          Tensor y = m->forward(at).pow(2).sum();
          Tensor gradient = torch::autograd::grad({y}, {at}, {}, true, true)[0];
          return (gradient.norm() - 1).pow(2) + y;
        },
        2e-4);
  });
}

TEST_P(AutogradFeatures, GraphsKeptForASecondBackward) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    Tensor sum;
    for (int r = 0; r < get_world_size(); ++r) {
      Tensor part = twins.plain->forward(input(r)).pow(2).sum() / get_world_size();
      sum = sum.defined() ? sum + part : part;
    }
    Tensor ours = twins.sharded->forward(input(get_rank())).pow(2).sum();
    for (Tensor loss : {sum, ours}) {
      loss.backward({}, /*retain_graph=*/true);
      free_all(twins.sharded);
      loss.backward();
    }
    twins.expect_same(get_world_size() == 1 ? 0 : 2e-5);
  });
}

TEST_P(AutogradFeatures, BackwardThatBuildsAGraph) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    for (auto* module : twins.both()) {
      (*module)
          ->forward(torch::ones({3, 5}))
          .pow(2)
          .sum()
          .backward({}, true, /*create_graph=*/true);
    }
    twins.expect_same(get_world_size() == 1 ? 0 : 2e-5);
    for (const Tensor& p : twins.both()[0]->get()->parameters()) p.mutable_grad().reset();
    for (const Tensor& p : twins.both()[1]->get()->parameters()) p.mutable_grad().reset();
  });
}

TEST_P(AutogradFeatures, AnomalyMode) {
  on_ranks(GetParam(), [](int) {
    torch::autograd::AnomalyMode::set_enabled(true);
    expect_same_loss([](TwoLinear& m, const Tensor& x) { return m->forward(x).pow(2).sum(); });
  });
}

TEST_P(AutogradFeatures, ForwardMode) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    const Tensor direction = torch::randn({5, 5}), x = torch::randn({3, 5});
    std::array<Tensor, 2> tangents;
    for (size_t i = 0; i < 2; ++i) {
      TwoLinear& m = *twins.both()[i];
      const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
      Tensor dual = at::_make_dual(m->a->weight, direction, static_cast<int64_t>(level));
      free_all(m);
      Tensor y = m->b(torch::tanh(x.mm(dual.t())));
      tangents[i] = std::get<1>(at::_unpack_dual(y, static_cast<int64_t>(level))).clone();
      torch::autograd::ForwardADLevel::release_idx(level);
    }
    ASSERT_TRUE(tangents[0].defined() && tangents[1].defined());
    EXPECT_EQ(difference(tangents[0], tangents[1]), 0);
  });
}

TEST_P(AutogradFeatures, ViewsThatLiveAcrossAReshard) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss([](TwoLinear& m, const Tensor& x) {
      Tensor view = m->a->weight.view({5, 5, 1}).select(1, 1);
      Tensor strided = m->b->weight.as_strided({3, 3}, {6, 2}, 1);
      Tensor halves = m->b->weight.split({2, 3}, 1)[1];
      free_all(m);
      Tensor y = x.mm(m->b->weight.t());
      free_all(m);
      Tensor z = (x * view.view({1, 5})).sum() + strided.exp().sum() + halves.pow(3).sum();
      free_all(m);
      return (y.sum() + z) * view.sin().sum();
    });
  });
}

TEST_P(AutogradFeatures, InferenceModeNextToTraining) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss([](TwoLinear& m, const Tensor& x) {
      Tensor inferred, viewed;
      {
        torch::InferenceMode inference;
        inferred = x.mm(m->a->weight);
        viewed = m->b->weight.t();
      }
      Tensor view;
      {
        torch::NoGradGuard no_grad;
        view = m->a->weight.t();
      }
      free_all(m);
      return x.mm(view).sum() + x.mm(viewed).sum() + m->forward(x).pow(2).sum() + inferred.sum();
    });
  });
}

TEST_P(AutogradFeatures, Autocast) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss(
        [](TwoLinear& m, const Tensor& x) {
          at::autocast::set_autocast_enabled(at::kCPU, true);
          Tensor y = m->forward(x).to(torch::kFloat) +
                     torch::mm(x, m->a->weight.t()).to(torch::kFloat) +
                     m->forward(2 * x).to(torch::kFloat);
          at::autocast::clear_cache();
          at::autocast::set_autocast_enabled(at::kCPU, false);
          return y.pow(2).sum();
        },
        5e-1);
  });
}

template <bool kSavedData>
struct Multiply : torch::autograd::Function<Multiply<kSavedData>> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w) {
    if (kSavedData) {
      context->saved_data["x"] = x;
      context->saved_data["w"] = w;
    } else {
      context->save_for_backward({x, w});
    }
    return x.mm(w.t());
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    Tensor x, w;
    if (kSavedData) {
      x = context->saved_data["x"].toTensor();
      w = context->saved_data["w"].toTensor();
    } else {
      const auto saved = context->get_saved_variables();
      x = saved[0];
      w = saved[1];
    }
    return {gradients[0].mm(w), gradients[0].t().mm(x)};
  }
};

TEST_P(AutogradFeatures, FunctionsThatSaveParameters) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss([](TwoLinear& m, const Tensor& x) {
      Tensor hidden = Multiply<false>::apply(x, m->a->weight);
      return Multiply<true>::apply(hidden, m->b->weight).pow(2).sum();
    });
  });
}

TEST_P(AutogradFeatures, MembersReplacedDuringForward) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss([](TwoLinear& m, const Tensor& x) {
      Tensor kept = m->a->weight;
      m->a->weight = kept * torch::relu(kept);  // as a parametrisation does
      Tensor y = m->forward(x).pow(2).sum();
      m->a->weight = kept;
      return y;
    });
  });
}

}  // namespace
}  // namespace fsdp2::testing::autograd_features
