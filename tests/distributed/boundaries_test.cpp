// Modules with a boundary: what is cast there, hooks, and what stays as in the plain module.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <fsdp2/nn.h>

namespace fsdp2::testing::boundaries {

struct Output {
  torch::Tensor logits;
  std::optional<torch::Tensor> aux;
  int64_t steps = 0;
};
template <class Visit>
void fsdp2_for_each_tensor(Output& output, Visit&& visit) {
  visit(output.logits, output.aux, output.steps);
}

struct Closed {
  torch::Tensor logits;
};

namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::kBFloat16;
using torch::kFloat;
using torch::Tensor;

class Boundaries : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Boundaries, ::testing::Values(1, 2, 3, 4));

FullyShardOptions policy(std::optional<torch::ScalarType> param,
                         std::optional<torch::ScalarType> output = std::nullopt) {
  FullyShardOptions options;
  options.mp_policy.param_dtype = param;
  if (param) options.mp_policy.reduce_dtype = kFloat;
  options.mp_policy.output_dtype = output;
  options.reshard_after_forward = true;
  return options;
}

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}

/// A layer whose forward hands its result over in some container.
template <class Make>
struct ReturningImpl : torch::nn::Module {
  torch::nn::Linear layer{nullptr};
  ReturningImpl() { layer = register_module("layer", torch::nn::Linear(3, 2)); }
  auto forward(const Tensor& x) { return Make()(layer(x), x); }
};

/// `take` finds the logits in what forward returned.
template <class Make, class Take>
void expect_right_gradient(int rank, const Take& take) {
  const double mean = (get_world_size() + 1) / 2.0;
  for (auto output : {std::optional<torch::ScalarType>(), std::optional(torch::kDouble)}) {
    auto module = std::make_shared<Hooked<ReturningImpl<Make>>>();
    {
      torch::NoGradGuard no_grad;
      for (Tensor& parameter : module->parameters()) parameter.fill_(3);
    }
    fully_shard(module, policy(std::nullopt, output));
    torch::optim::SGD optimizer(module->parameters(), 1.0);
    auto result = module->forward(torch::full({1, 3}, rank + 1.0));
    Tensor logits = take(result);
    EXPECT_EQ(logits.scalar_type(), output.value_or(kFloat));
    logits.sum().backward();
    optimizer.step();
    for (const auto& item : module->named_parameters()) {
      const double gradient = item.key() == "layer.weight" ? mean : 1.0;
      EXPECT_LE(
          difference(full(item.value().grad()), torch::full_like(full(item.value()), gradient)),
          1e-6);
      EXPECT_LE(difference(full(item.value()), torch::full_like(full(item.value()), 3 - gradient)),
                1e-6);
    }
  }
}

struct MakeStruct {
  Output operator()(Tensor y, const Tensor& x) const { return {y, std::nullopt, x.size(0)}; }
};
struct MakeTuple {
  auto operator()(Tensor y, const Tensor& x) const { return std::tuple(y, Tensor(), x.size(0)); }
};
struct MakePair {
  auto operator()(Tensor y, const Tensor& x) const {
    return std::pair(std::string("y"), std::pair(y, x));
  }
};
struct MakeVector {
  auto operator()(Tensor y, const Tensor& x) const { return std::vector<Tensor>{x, y}; }
};
struct MakeArray {
  auto operator()(Tensor y, const Tensor& x) const { return std::array<Tensor, 2>{x, y}; }
};
struct MakeMap {
  auto operator()(Tensor y, const Tensor& x) const {
    return std::map<std::string, Tensor>{{"x", x}, {"y", y}};
  }
};
struct MakeMapOfVectors {
  auto operator()(Tensor y, const Tensor& x) const {
    return std::unordered_map<std::string, std::vector<Tensor>>{{"all", {x, y}}, {"none", {}}};
  }
};
struct MakeDict {
  auto operator()(Tensor y, const Tensor&) const {
    c10::Dict<std::string, Tensor> dict;
    dict.insert("y", y);
    return dict;
  }
};
struct MakeList {
  auto operator()(Tensor y, const Tensor& x) const { return c10::List<Tensor>({x, y}); }
};
struct MakeOrderedDict {
  auto operator()(Tensor y, const Tensor&) const {
    torch::OrderedDict<std::string, Tensor> dict;
    dict.insert("y", y);
    return dict;
  }
};
struct MakeOptional {
  auto operator()(Tensor y, const Tensor&) const { return std::optional(y); }
};
struct MakeVariant {
  auto operator()(Tensor y, const Tensor&) const { return std::variant<int, Tensor>(y); }
};
struct MakeClosed {
  Closed operator()(Tensor y, const Tensor&) const { return {y}; }
};

TEST_P(Boundaries, EveryReturnTypeIsCastAndTrains) {
  on_ranks(GetParam(), [](int rank) {
    expect_right_gradient<MakeStruct>(rank, [](Output& r) { return r.logits; });
    expect_right_gradient<MakeTuple>(rank, [](auto& r) {
      EXPECT_FALSE(std::get<1>(r).defined());
      return std::get<0>(r);
    });
    expect_right_gradient<MakePair>(rank, [](auto& r) { return r.second.first; });
    expect_right_gradient<MakeVector>(rank, [](auto& r) { return r.at(1); });
    expect_right_gradient<MakeArray>(rank, [](auto& r) { return r.at(1); });
    expect_right_gradient<MakeMap>(rank, [](auto& r) { return r.at("y"); });
    expect_right_gradient<MakeMapOfVectors>(rank, [](auto& r) { return r.at("all").at(1); });
    expect_right_gradient<MakeDict>(rank, [](auto& r) { return r.at("y"); });
    expect_right_gradient<MakeList>(rank, [](auto& r) { return r.get(1); });
    expect_right_gradient<MakeOrderedDict>(rank, [](auto& r) { return r["y"]; });
    expect_right_gradient<MakeOptional>(rank, [](auto& r) { return *r; });
    expect_right_gradient<MakeVariant>(rank, [](auto& r) { return std::get<Tensor>(r); });
  });
}

TEST_P(Boundaries, ATypeThatCannotBeSearchedIsAnErrorOnlyWhereACastIsWanted) {
  on_ranks(GetParam(), [](int) {
    auto module = std::make_shared<Hooked<ReturningImpl<MakeClosed>>>();
    fully_shard(module, policy(std::nullopt));
    module->forward(torch::ones({1, 3})).logits.sum().backward();
    EXPECT_TRUE(module->parameters()[0].grad().defined());
    auto cast = std::make_shared<Hooked<ReturningImpl<MakeClosed>>>();
    fully_shard(cast, policy(std::nullopt, kBFloat16));
    EXPECT_THAT(error_of([&] { cast->forward(torch::ones({1, 3})); }),
                AllOf(HasSubstr("boundaries::Closed"), HasSubstr("fsdp2_for_each_tensor"),
                      HasSubstr("BFloat16")));
  });
}

/// Notes what its forward is given.
struct ProbeImpl : torch::nn::Module {
  Tensor w;
  std::vector<torch::ScalarType> seen;
  ProbeImpl() { w = register_parameter("w", torch::ones({4})); }
  Tensor forward(const Tensor& x, Tensor ids, const Tensor& table, const Output& more) {
    seen = {w.scalar_type(), x.scalar_type(), ids.scalar_type(), table.scalar_type(),
            more.logits.scalar_type()};
    return (w * x.to(w.scalar_type())).sum();
  }
};

TEST_P(Boundaries, InputsAreCastAndMastersStayInFloat) {
  on_ranks(GetParam(), [](int) {
    for (bool cast : {true, false}) {
      for (bool output : {true, false}) {
        for (bool through_handle : {true, false}) {
          auto plain = std::make_shared<ProbeImpl>();
          auto hooked = std::make_shared<Hooked<ProbeImpl>>();
          auto options = policy(kBFloat16);
          if (output) options.mp_policy.output_dtype = kFloat;
          options.mp_policy.cast_forward_inputs = cast;
          ProbeImpl& probe = through_handle ? *plain : *hooked;
          const auto sharded_plain = fully_shard(plain, options);
          fully_shard(hooked, options);
          torch::optim::SGD optimizer(probe.parameters(), 0.001);
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            const Tensor x = torch::ones({4}), table = torch::ones({8});
            const Output more{torch::ones({2}), std::nullopt, 3};
            Tensor y = through_handle ? sharded_plain(x, torch::arange(3), table, more)
                                      : hooked->forward(x, torch::arange(3), table, more);
            EXPECT_EQ(x.scalar_type(), kFloat);
            EXPECT_EQ(more.logits.scalar_type(), kFloat);
            EXPECT_EQ(y.scalar_type(), output ? kFloat : kBFloat16);
            y.backward();
            optimizer.step();
          }
          const auto arrives = cast ? kBFloat16 : kFloat;
          EXPECT_THAT(probe.seen, ElementsAre(kBFloat16, arrives, torch::kLong, arrives, arrives));
          const Tensor w = probe.parameters()[0];
          EXPECT_EQ(w.scalar_type(), kFloat);
          EXPECT_EQ(w.grad().scalar_type(), kFloat);
          EXPECT_LE(difference(full(w), torch::full({4}, 0.996)), 1e-6);
        }
      }
    }
  });
}

/// A residual block between others, for nested policies.
struct ResidualImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr};
  ResidualImpl() { a = register_module("a", torch::nn::Linear(5, 5)); }
  Tensor forward(Tensor x) { return x + torch::tanh(a(x)); }
};

TEST_P(Boundaries, NestedPoliciesEqualCastsByHand) {
  on_ranks(GetParam(), [](int rank) {
    const auto make = [] {
      torch::manual_seed(3);
      return std::tuple(HookedHolder<ResidualImpl>(),
                        nn::LayerNorm(torch::nn::LayerNormOptions({5})),
                        HookedHolder<ResidualImpl>());
    };
    auto [first, norm, last] = make();
    auto [low_first, plain_norm, low_last] = make();
    fully_shard(first, policy(kBFloat16));
    fully_shard(norm, policy(kFloat));
    fully_shard(last, policy(kBFloat16, kFloat));
    low_first->to(kBFloat16);
    low_last->to(kBFloat16);
    const std::vector<Tensor> by_hand = {low_first->a->weight, plain_norm->weight,
                                         low_last->a->weight};
    std::vector<Tensor> means(3);
    for (int turn = 0; turn < get_world_size(); ++turn) {
      Tensor h = low_first(input(turn).to(kBFloat16));
      h = low_last(plain_norm(h.to(kFloat)).to(kBFloat16)).to(kFloat);
      const auto gradients = torch::autograd::grad({h.pow(2).sum()}, by_hand);
      for (size_t i = 0; i < 3; ++i) {
        const Tensor part = gradients[i].to(kFloat) / get_world_size();
        means[i] = means[i].defined() ? means[i] + part : part;
      }
    }
    Tensor h = first(input(rank));
    EXPECT_EQ(h.scalar_type(), kBFloat16) << "the residual stream is cast too";
    h = norm(h);
    EXPECT_EQ(h.scalar_type(), kFloat);
    h = last(h);
    EXPECT_EQ(h.scalar_type(), kFloat);
    h.pow(2).sum().backward();
    const double bound = rounding_bound();
    EXPECT_LE(difference(full(first->a->parameters()[0].grad()), means[0]), bound);
    EXPECT_LE(difference(full(norm->parameters()[0].grad()), means[1]), bound);
    EXPECT_LE(difference(full(last->a->parameters()[0].grad()), means[2]), bound);
  });
}

/// Computes with its weight in float, as norms do.
struct ScaleImpl : torch::nn::Module {
  Tensor weight;
  ScaleImpl() { weight = register_parameter("weight", torch::ones({5})); }
  Tensor forward(const Tensor& x) { return x.to(kFloat) * weight; }
};

TEST_P(Boundaries, InsideABoundaryDtypesPromoteAsInTorch) {
  on_ranks(GetParam(), [](int rank) {
    auto hooked = std::make_shared<Hooked<ScaleImpl>>();
    auto plain = std::make_shared<ScaleImpl>();
    fully_shard(hooked, policy(kBFloat16));
    const auto sharded = fully_shard(plain, policy(kBFloat16));
    EXPECT_EQ(hooked->forward(input(rank)).scalar_type(), kFloat);
    EXPECT_EQ(sharded(input(rank)).scalar_type(), kFloat);
    EXPECT_EQ(plain->forward(input(rank)).scalar_type(), kBFloat16) << "no boundary was passed";
    // forward() is not virtual.
    EXPECT_EQ(static_cast<ScaleImpl&>(*hooked).forward(input(rank)).scalar_type(), kBFloat16);
  });
}

TEST_P(Boundaries, HooksRunInOrderReplaceAndCanBeRemoved) {
  on_ranks(GetParam(), [](int rank) {
    nn::Linear layer(5, 5);
    std::vector<std::string> ran;
    fully_shard(layer, policy(kBFloat16, kFloat));
    auto first = layer->register_forward_pre_hook([&](torch::nn::Module& module, Values& inputs) {
      EXPECT_EQ(&module, layer.get());
      EXPECT_EQ(inputs.size(), 1U);
      EXPECT_EQ(inputs.get<Tensor>().scalar_type(), kBFloat16);
      ran.emplace_back("first");
    });
    layer->register_forward_pre_hook([&](torch::nn::Module&, Values& inputs) {
      inputs.get<Tensor>() = inputs.get<Tensor>() * 2;
      ran.emplace_back("second");
    });
    auto third =
        layer->register_forward_hook([&](torch::nn::Module&, Values& inputs, Values& output) {
          EXPECT_EQ(difference(inputs.get<Tensor>(), input(rank).to(kBFloat16) * 2), 0);
          EXPECT_EQ(output.get<Tensor>().scalar_type(), kBFloat16);
          output.get<Tensor>() = output.get<Tensor>() + 1;
          ran.emplace_back("third");
        });
    const auto by_hand = [&] {
      return torch::linear(input(rank).to(kBFloat16) * 2, layer->weight, layer->bias);
    };
    EXPECT_EQ(difference(layer(input(rank)), (by_hand() + 1).to(kFloat)), 0);
    EXPECT_EQ(difference(layer->forward(input(rank)), (by_hand() + 1).to(kFloat)), 0);
    EXPECT_THAT(ran, ElementsAre("first", "second", "third", "first", "second", "third"));
    third.remove();
    first.remove();
    first.remove();
    ran.clear();
    EXPECT_EQ(difference(layer(input(rank)), by_hand().to(kFloat)), 0);
    EXPECT_THAT(ran, ElementsAre("second"));
    layer->register_forward_pre_hook(
        [](torch::nn::Module&, Values& inputs) { inputs.get<int>(0) = 1; });
    EXPECT_THAT(error_of([&] { layer(input(rank)); }),
                AllOf(HasSubstr("value 0"), HasSubstr("int"), HasSubstr("Tensor")));
  });
}

TEST(Hooked, IsTheModuleInAllElse) {
  torch::manual_seed(1);
  nn::Linear hooked(4, 3);
  torch::manual_seed(1);
  torch::nn::Linear plain(4, 3);
  const Tensor x = torch::randn({2, 4});
  EXPECT_EQ(difference(hooked(x), plain(x)), 0);
  EXPECT_EQ(hooked->named_parameters().keys(), plain->named_parameters().keys());

  torch::nn::Sequential sequence(hooked, nn::ReLU(), torch::nn::Linear(3, 2));
  EXPECT_EQ(sequence->named_parameters().keys(),
            (std::vector<std::string>{"0.weight", "0.bias", "2.weight", "2.bias"}));
  int calls = 0;
  auto handle =
      hooked->register_forward_hook([&](torch::nn::Module&, Values&, Values&) { ++calls; });
  sequence->forward(x);
  torch::nn::AnyModule(hooked).forward(x);
  EXPECT_EQ(calls, 2);

  auto copy = std::dynamic_pointer_cast<Hooked<torch::nn::LinearImpl>>(hooked->clone());
  ASSERT_TRUE(copy);
  EXPECT_EQ(difference(copy->forward(x), plain(x)), 0);
  EXPECT_EQ(calls, 2) << "hooks stay with the original";
  EXPECT_FALSE(copy->weight.is_same(hooked->weight));
  EXPECT_TRUE(copy->weight.is_same(copy->parameters()[0]));

  std::stringstream saved;
  torch::save(hooked, saved);
  torch::nn::Linear loaded(4, 3);
  torch::load(loaded, saved);
  EXPECT_EQ(difference(loaded->weight, plain->weight), 0);

  hooked = nullptr;
  handle.remove();  // of a module that Sequential still holds
  sequence->forward(x);
  EXPECT_EQ(calls, 2);
}

/// Several forwards, and a method besides.
struct ManyImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr};
  ManyImpl() { a = register_module("a", torch::nn::Linear(5, 5)); }
  Tensor forward(const Tensor& x) { return a(x); }
  Tensor forward(const Tensor& x, const Tensor& y) { return a(x) + y; }
  Tensor encode(const Tensor& x, double factor) { return a(x) * factor; }
  void inspect(Tensor& x) { x = a(x); }
};

TEST_P(Boundaries, OverloadsDefaultsAndOtherMethods) {
  on_ranks(GetParam(), [](int rank) {
    HookedHolder<ManyImpl> module;
    auto sharded = fully_shard(module, policy(kBFloat16, kFloat));
    int calls = 0;
    module->register_forward_hook([&](torch::nn::Module&, Values&, Values&) { ++calls; });
    Tensor x = input(rank);
    EXPECT_EQ(module(x).scalar_type(), kFloat);
    EXPECT_EQ(module(x, x).scalar_type(), kFloat);
    EXPECT_EQ(module->call(&ManyImpl::encode, x, 2.0).scalar_type(), kFloat);
    EXPECT_EQ(calls, 3);
    EXPECT_EQ(sharded(x, x).scalar_type(), kFloat);
    EXPECT_EQ(calls, 4);
    EXPECT_EQ(sharded.call(&ManyImpl::encode, x, 2.0).scalar_type(), kFloat);
    Tensor in_place = x.to(kBFloat16);
    sharded.call(&ManyImpl::inspect, in_place);
    EXPECT_EQ(difference(in_place, module->a->forward(x.to(kBFloat16))), 0);

    nn::LSTM lstm(torch::nn::LSTMOptions(5, 5).batch_first(true));
    fully_shard(lstm, policy(std::nullopt, torch::kDouble));
    auto [out, state] = lstm(x.unsqueeze(0));
    EXPECT_EQ(out.scalar_type(), torch::kDouble);
    EXPECT_EQ(std::get<1>(state).scalar_type(), torch::kDouble);
    auto again = lstm(x.unsqueeze(0),
                      std::optional(std::tuple(torch::ones({1, 1, 5}), torch::ones({1, 1, 5}))));
    EXPECT_EQ(std::get<0>(again).scalar_type(), torch::kDouble);
  });
}

TEST_P(Boundaries, TheHandleKeepsItsModuleAndIsOneOfTheControls) {
  on_ranks(GetParam(), [](int rank) {
    auto sharded = fully_shard(TwoLinear(), policy(kBFloat16));
    EXPECT_EQ(sharded(input(rank)).scalar_type(), kBFloat16);
    FSDPModule controls = sharded;
    controls.reshard();
    EXPECT_FALSE(sharded.is_unsharded());
    EXPECT_THAT(error_of([] { fully_shard(TwoLinear(), policy(std::nullopt, torch::kInt)); }),
                HasSubstr("must be floating"));
  });
}

}  // namespace
}  // namespace fsdp2::testing::boundaries
