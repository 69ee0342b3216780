// Ops of the user's own on gathered parameters: with and without autograd kernels, registered
// before and after the first wrap; integer and boolean parameters as indices.

#include "support/ranks.h"
#include "support/twins.h"

#include <torch/library.h>

namespace fsdp2::testing::custom_ops {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Binary = Tensor(const Tensor&, const Tensor&);

Tensor call(const char* name, const Tensor& a, const Tensor& b) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Binary>().call(a, b);
}

/// Reads raw data, as a user's kernel does.
Tensor multiply(const Tensor& a, const Tensor& b) {
  Tensor x = a.contiguous(), y = b.contiguous(), out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    out.data_ptr<float>()[i] = x.const_data_ptr<float>()[i] * y.const_data_ptr<float>()[i];
  }
  return out;
}

struct Multiply : torch::autograd::Function<Multiply> {
  static Tensor forward(AutogradContext* context, const Tensor& a, const Tensor& b) {
    context->save_for_backward({a, b});
    at::AutoDispatchBelowADInplaceOrView below;
    return call("fsdp2_test::differentiable", a, b);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], gradients[0] * saved[0]};
  }
};

TORCH_LIBRARY(fsdp2_test, m) {
  m.def("plain(Tensor a, Tensor b) -> Tensor");
  m.def("differentiable(Tensor a, Tensor b) -> Tensor");
  m.def("composite(Tensor a, Tensor b) -> Tensor");
  m.def("explicit(Tensor a, Tensor b) -> Tensor");
}
TORCH_LIBRARY_IMPL(fsdp2_test, CPU, m) {
  m.impl("plain", &multiply);
  m.impl("differentiable", &multiply);
}
TORCH_LIBRARY_IMPL(fsdp2_test, AutogradCPU, m) {
  m.impl("differentiable", [](const Tensor& a, const Tensor& b) { return Multiply::apply(a, b); });
}
TORCH_LIBRARY_IMPL(fsdp2_test, CompositeImplicitAutograd, m) {
  m.impl("composite", [](const Tensor& a, const Tensor& b) { return torch::mul(a, b).sin(); });
}
TORCH_LIBRARY_IMPL(fsdp2_test, CompositeExplicitAutograd, m) { m.impl("explicit", &multiply); }

class CustomOps : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CustomOps, ::testing::Values(1, 2));

void expect_same_op(const char* name, bool differentiable) {
  Twins<TwoLinear> twins;
  wrap_layers(twins.sharded, true);
  auto run = [&](TwoLinear& m, int r) {
    return call(name, m->a->weight, torch::full({5, 5}, r + 1.0)) +
           call(name, m->b->weight, m->a->weight) + call(name, m->b->weight.t(), m->b->weight);
  };
  {
    torch::NoGradGuard no_grad;
    EXPECT_EQ(difference(run(twins.sharded, 0), run(twins.plain, 0)), 0) << name;
  }
  EXPECT_EQ(difference(run(twins.sharded, 0), run(twins.plain, 0)), 0) << name;
  EXPECT_EQ(run(twins.sharded, 0).requires_grad(), run(twins.plain, 0).requires_grad()) << name;
  if (!differentiable) return;
  twins.backward([&](TwoLinear& m, int r) { return run(m, r).pow(2).sum(); });
  twins.expect_same(rounding_bound());
}

TEST_P(CustomOps, OfEveryKindOfKernel) {
  on_ranks(GetParam(), [](int) {
    expect_same_op("fsdp2_test::plain", false);
    expect_same_op("fsdp2_test::explicit", false);
    expect_same_op("fsdp2_test::differentiable", true);
    expect_same_op("fsdp2_test::composite", true);
  });
}

TEST_P(CustomOps, RegisteredAfterTheFirstWrap) {
  on_ranks(GetParam(), [](int) {
    expect_same_op("fsdp2_test::plain", false);
    torch::Library late(torch::Library::DEF, "fsdp2_test_late", std::nullopt, __FILE__, __LINE__);
    late.def("plain(Tensor a, Tensor b) -> Tensor");
    late.def("explicit(Tensor a, Tensor b) -> Tensor");
    torch::Library cpu(torch::Library::IMPL, "fsdp2_test_late", c10::DispatchKey::CPU, __FILE__,
                       __LINE__);
    cpu.impl("plain", &multiply);
    torch::Library composite(torch::Library::IMPL, "fsdp2_test_late",
                             c10::DispatchKey::CompositeExplicitAutograd, __FILE__, __LINE__);
    composite.impl("explicit", &multiply);
    expect_same_op("fsdp2_test_late::plain", false);
    expect_same_op("fsdp2_test_late::explicit", false);
  });
}

struct PickerImpl : torch::nn::Module {
  Tensor rows, mask, weight;
  PickerImpl() {
    rows = register_parameter("rows", torch::tensor({2, 0, 4}), /*requires_grad=*/false);
    mask = register_parameter("mask", torch::tensor({true, false, true, true, false}), false);
    weight = register_parameter("weight", torch::randn({5, 3}));
  }
  Tensor forward(const Tensor& x) {
    Tensor filled = torch::zeros({5, 3});
    filled.index_put_({rows}, x.index({rows}) * 2);
    return x.index({rows}).sum() + weight.index({rows}).pow(2).sum() + weight.index({mask}).sum() +
           (filled * weight).sum() + weight.index_select(0, rows).sin().sum() +
           weight.index({rows, torch::tensor({0, 1, 2})}).sum() +
           torch::where(mask.view({5, 1}), weight, x).exp().sum() +
           torch::embedding(weight, rows).cos().sum() +
           at::_unsafe_index(weight, c10::List<std::optional<Tensor>>({rows})).sum() +
           x.masked_fill(mask.view({5, 1}), 0).sum() +
           x.index({torch::indexing::None, rows, torch::indexing::Slice()}).sum();
  }
};
TORCH_MODULE(Picker);

TEST_P(CustomOps, IntegerAndBooleanParametersAsIndices) {
  on_ranks(GetParam(), [](int) {
    Twins<Picker> twins;
    fully_shard(twins.sharded);
    for (int step = 0; step < 2; ++step) {
      twins.backward([](Picker& m, int r) {
        torch::manual_seed(100 + r);
        return m->forward(torch::randn({5, 3}));
      });
      as_fsdp(*twins.sharded).reshard();
      twins.expect_same(rounding_bound());
    }
    const Tensor x = torch::randn({5, 3});
    torch::NoGradGuard no_grad;
    Tensor a = x.clone(), b = x.clone();
    a.index_put_({twins.plain->mask}, 0);
    b.index_put_({twins.sharded->mask}, 0);
    EXPECT_EQ(difference(a, b), 0);
  });
}

}  // namespace
}  // namespace fsdp2::testing::custom_ops
