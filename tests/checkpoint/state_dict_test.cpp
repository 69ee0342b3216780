// Model and optimizer state by name.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/training.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2::state_dict_test {
namespace {

using dcp::StateDict;
using fsdp2::testing::difference;
using fsdp2::testing::error_of;
using fsdp2::testing::full;
using fsdp2::testing::on_ranks;
using fsdp2::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// --- frozen parameters and partial state
// ----------------------------------------------------------

struct Four : torch::nn::Module {
  std::vector<torch::Tensor> p;
  Four() {
    for (int i = 0; i < 4; ++i) {
      p.push_back(register_parameter("p" + std::to_string(i), torch::full({4, 3}, i + 1.)));
    }
  }
};

std::unique_ptr<torch::optim::Adam> adam(torch::nn::Module& model) {
  return std::make_unique<torch::optim::Adam>(model.parameters(),
                                              torch::optim::AdamOptions(0.1).weight_decay(0.01));
}

void train(Four& model, torch::optim::Optimizer& optimizer, int steps) {
  const auto parameters = model.named_parameters();
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = torch::zeros({});
    for (const char* name : {"p0", "p1"}) {
      const int i = name[1] - '0';
      if (parameters[name].requires_grad()) loss = loss + (model.p[i] * (i + 2.)).square().sum();
    }
    loss.backward();
    optimizer.step();
  }
}

struct Trained {
  std::shared_ptr<Four> model = std::make_shared<Four>();
  std::unique_ptr<torch::optim::Adam> optimizer;
  torch::Tensor parameter(int i) { return model->named_parameters()["p" + std::to_string(i)]; }
  Trained() {
    fully_shard(model);
    optimizer = adam(*model);
    parameter(2).set_requires_grad(false);
  }
};

TEST(FrozenParameters, StateOfThoseTrainedEarlierSurvives) {
  const TemporaryFolder folder;
  const std::string path = folder.path("c");
  on_ranks(2, [&](int) {
    Trained first;
    train(*first.model, *first.optimizer, 2);
    first.parameter(0).set_requires_grad(false);
    train(*first.model, *first.optimizer, 2);
    dcp::save({{"train", training_state(first.model, *first.optimizer)}}, path);

    Trained second;
    second.parameter(0).set_requires_grad(false);
    StateDict state = {{"train", training_state(second.model, *second.optimizer)}};
    dcp::load(state, path);
    const StateDict got = get_optimizer_state_dict(*second.model, *second.optimizer);
    const auto step = [&](const char* name) {
      return got.at("state").at(name).at("step").to_tensor().item<double>();
    };
    EXPECT_EQ(step("p0"), 2);
    EXPECT_EQ(step("p1"), 4);
    EXPECT_EQ(step("p3"), 0);
    EXPECT_FALSE(got.at("state").dict().contains("p2"));

    for (Trained* run : {&first, &second}) {
      run->parameter(0).set_requires_grad(true);
      train(*run->model, *run->optimizer, 2);
    }
    for (int i = 0; i < 4; ++i) {
      EXPECT_LE(difference(full(first.parameter(i)), full(second.parameter(i))), 1e-7) << i;
    }
    EXPECT_TRUE(torch::equal(full(second.parameter(2)), torch::full({4, 3}, 3.)));
  });
}

TEST(FrozenParameters, MissingStateIsNamedInBothForms) {
  on_ranks(2, [&](int) {
    Trained run;
    train(*run.model, *run.optimizer, 1);
    for (const bool flat : {false, true}) {
      StateDict state = get_optimizer_state_dict(*run.model, *run.optimizer,
                                                 {.flatten_optimizer_state_dict = flat});
      if (flat) {
        for (const std::string& key : state.keys()) {
          if (key.starts_with("state.p1.")) state.erase(key);
        }
      } else {
        state["state"].dict().erase("p1");
      }
      EXPECT_THAT(error_of([&] { set_optimizer_state_dict(*run.model, *run.optimizer, state); }),
                  AllOf(HasSubstr("no state of p1"), HasSubstr("strict")));
      set_optimizer_state_dict(*run.model, *run.optimizer, state, {.strict = false});
    }
  });
}

TEST(FrozenParameters, AnAdapterAloneCanBeLoaded) {
  on_ranks(2, [&](int) {
    Trained run;
    for (const int i : {0, 3}) run.parameter(i).set_requires_grad(false);
    const StateDict adapter = {{"p1", torch::full({4, 3}, 7.)}};
    EXPECT_THAT(error_of([&] { set_model_state_dict(*run.model, adapter); }), HasSubstr("p0"));
    set_model_state_dict(*run.model, adapter, {.ignore_frozen_params = true});
    EXPECT_TRUE(torch::equal(full(run.parameter(1)), torch::full({4, 3}, 7.)));
    for (const int i : {0, 2, 3}) {
      EXPECT_TRUE(torch::equal(full(run.parameter(i)), torch::full({4, 3}, i + 1.)));
    }
    EXPECT_THAT(get_model_state_dict(*run.model, {.ignore_frozen_params = true}).keys(),
                ElementsAre("p1"));
    const auto keys = set_model_state_dict(
        *run.model, {{"p1", torch::ones({4, 3})}, {"p9", torch::ones({1})}}, {.strict = false});
    EXPECT_THAT(keys.missing_keys, ElementsAre("p0", "p2", "p3"));
    EXPECT_THAT(keys.unexpected_keys, ElementsAre("p9"));
  });
}

// --- rank 0 alone has the state
// -------------------------------------------------------------------

struct Net : torch::nn::Module {
  torch::nn::Linear linear{3, 6};
  torch::nn::BatchNorm1d bn{3};
  Net() {
    register_module("0", linear);
    register_module("bn", bn);
  }
};

StateDict full_state() {
  return {{"0.weight", torch::arange(18.).view({6, 3})},
          {"0.bias", torch::arange(6.)},
          {"bn.weight", torch::ones({3})},
          {"bn.bias", torch::zeros({3})},
          {"bn.running_mean", torch::arange(3.)},
          {"bn.running_var", torch::ones({3})},
          {"bn.num_batches_tracked", torch::tensor(int64_t{5})}};
}

void expect_rank_0_is_enough(const std::vector<int64_t>& shape) {
  on_ranks(4, [&](int rank) {
    const auto mesh = init_device_mesh(
        "cpu", shape,
        shape.size() == 2 ? std::vector<std::string>{"r", "s"} : std::vector<std::string>{"s"});
    const auto module = std::make_shared<Net>();
    fully_shard(module, {.mesh = mesh});
    Net& net = *module;
    const StateDictOptions options{.full_state_dict = true, .broadcast_from_rank0 = true};
    const StateDict before = get_model_state_dict(net);
    std::vector<torch::Tensor> values;
    for (const auto& [key, value] : before) values.push_back(full(value.to_tensor()).clone());
    const auto unchanged = [&] {
      size_t i = 0;
      for (const auto& [key, value] : before) {
        if (!torch::equal(full(value.to_tensor()), values[i++])) return false;
      }
      return true;
    };
    const auto error_with = [&](const std::function<void(StateDict&)>& change) {
      StateDict state;
      if (rank == 0) {
        state = full_state();
        change(state);
      }
      return error_of([&] { set_model_state_dict(net, state, options); });
    };
    EXPECT_THAT(error_with([](StateDict& s) { s.erase("0.bias"); }), HasSubstr("lacks 0.bias"));
    EXPECT_THAT(error_with([](StateDict& s) { s["extra"] = torch::ones({1}); }),
                HasSubstr("no extra"));
    EXPECT_THAT(error_with([](StateDict& s) { s["0.weight"] = torch::ones({6, 4}); }),
                AllOf(HasSubstr("0.weight"), HasSubstr("[6, 4]"), HasSubstr("[6, 3]")));
    EXPECT_TRUE(unchanged());

    set_model_state_dict(net, rank == 0 ? full_state() : StateDict(), options);
    const StateDict wanted = full_state();
    for (const auto& [key, value] : get_model_state_dict(net)) {
      const torch::Tensor is = full(value.to_tensor()), should_be = wanted.at(key).to_tensor();
      EXPECT_EQ(is.scalar_type(), should_be.scalar_type()) << key;
      EXPECT_TRUE(torch::equal(is, should_be)) << key;
    }

    // The optimizer likewise: what rank 0 has after two steps reaches a fresh one everywhere.
    torch::optim::Adam trained(net.parameters(), torch::optim::AdamOptions(0.1));
    for (int step = 0; step < 2; ++step) {
      trained.zero_grad();
      net.linear(torch::ones({2, 3})).square().sum().backward();
      trained.step();
    }
    const StateDict whole =
        get_optimizer_state_dict(net, trained, {.full_state_dict = true, .cpu_offload = true});
    EXPECT_EQ(whole.empty(), rank != 0);
    torch::optim::Adam fresh(net.parameters(), torch::optim::AdamOptions(0.5));
    set_optimizer_state_dict(net, fresh, whole, options);
    const StateDict a =
        get_optimizer_state_dict(net, trained, {.flatten_optimizer_state_dict = true});
    const StateDict b =
        get_optimizer_state_dict(net, fresh, {.flatten_optimizer_state_dict = true});
    ASSERT_EQ(a.keys(), b.keys());
    for (const auto& [key, value] : a) {
      if (value.is_tensor()) {
        EXPECT_TRUE(torch::equal(full(value.to_tensor()), full(b.at(key).to_tensor()))) << key;
      }
    }
    EXPECT_EQ(b.at("param_groups.0.weight.lr").to_double(), 0.1);
    EXPECT_TRUE(is_dtensor(b.at("state.0.weight.exp_avg").to_tensor()));
    EXPECT_THAT(error_of([&] { set_model_state_dict(net, {}, {.broadcast_from_rank0 = true}); }),
                HasSubstr("full_state_dict"));
  });
}

TEST(BroadcastFromRank0, OverOneDimension) { expect_rank_0_is_enough({4}); }
TEST(BroadcastFromRank0, WithReplicas) { expect_rank_0_is_enough({2, 2}); }

// --- names, options, groups
// -----------------------------------------------------------------------

TEST(StateDicts, GettersChangeNothingAndNamesArePythons) {
  on_ranks(2, [&](int) {
    const auto module = std::make_shared<Net>();
    fully_shard(module);
    Net& net = *module;
    torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(0.1));
    const auto [model, optim] = get_state_dict(net, optimizer);
    EXPECT_THAT(model.keys(),
                ElementsAre("0.weight", "0.bias", "bn.weight", "bn.bias", "bn.running_mean",
                            "bn.running_var", "bn.num_batches_tracked"));
    EXPECT_TRUE(optimizer.state().empty());
    EXPECT_THAT(optim.at("state").at("0.weight").dict().keys(),
                ElementsAre("step", "exp_avg", "exp_avg_sq"));
    EXPECT_THAT(
        optim.at("param_groups").items()[0].dict().keys(),
        ElementsAre("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach",
                    "capturable", "differentiable", "fused", "decoupled_weight_decay", "params"));
    const auto& step = optim.at("state").at("0.weight").at("step").to_tensor();
    EXPECT_EQ(step.dim(), 0);
    EXPECT_EQ(step.scalar_type(), torch::kFloat32);
    EXPECT_THAT(
        get_model_state_dict(net, {.submodules = {"bn"}, .keep_submodule_prefixes = false}).keys(),
        ElementsAre("weight", "bias", "running_mean", "running_var", "num_batches_tracked"));
    EXPECT_THAT(error_of([&] { get_model_state_dict(net, {.submodules = {"bm"}}); }),
                AllOf(HasSubstr("bm"), HasSubstr("did you mean bn?")));
  });
}

TEST(StateDicts, AModulesOwnMembersAreSavedWhole) {
  const TemporaryFolder folder;
  on_ranks(2, [&](int) {
    const auto net = std::make_shared<Net>();
    fully_shard(net);
    const torch::Tensor values = full(net->named_parameters()["0.weight"]).clone();
    for (const bool async : {false, true}) {
      const StateDict state = {{"w", net->linear->weight}};
      const std::string path = folder.path(async ? "async" : "sync");
      if (async) {
        dcp::async_save(state, path).wait();
      } else {
        dcp::save(state, path, {.threads = 2});
      }
      EXPECT_TRUE(torch::equal(dcp::load_one(path, "w").to_tensor(), values));
    }
    dcp::finish_async_saves();
  });
}

TEST(StateDicts, UnknownOptionsOfAGroupAreKept) {
  Net net;
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(0.1));
  StateDict state = get_optimizer_state_dict(net, optimizer);
  dcp::Value group = state["param_groups"].items()[0];
  group["initial_lr"] = 0.25;
  group["foreach"] = true;
  group["lr"] = torch::tensor(0.5);
  state["param_groups"] = dcp::List{group};
  set_optimizer_state_dict(net, optimizer, state);
  EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(),
            0.5);
  const StateDict kept = get_optimizer_state_dict(net, optimizer);
  EXPECT_EQ(kept.at("param_groups").items()[0].at("initial_lr").to_double(), 0.25);
  EXPECT_TRUE(kept.at("param_groups").items()[0].at("foreach").to_bool());
  EXPECT_EQ(kept.at("param_groups").items()[0].at("lr").to_double(), 0.5);

  group["maximize"] = true;
  state["param_groups"] = dcp::List{group};
  EXPECT_THAT(error_of([&] { set_optimizer_state_dict(net, optimizer, state); }),
              HasSubstr("maximize = true"));
  group["maximize"] = false;
  group["decoupled_weight_decay"] = false;
  state["param_groups"] = dcp::List{group};
  EXPECT_THAT(error_of([&] { set_optimizer_state_dict(net, optimizer, state); }),
              HasSubstr("decoupled_weight_decay"));
}

template <class Optimizer, class Options>
void expect_optimizer_continues(const Options& options) {
  const TemporaryFolder folder;
  const std::string path = folder.path("c");
  on_ranks(3, [&](int) {
    const auto step = [](Net& net, torch::optim::Optimizer& optimizer) {
      optimizer.zero_grad();
      net.linear(torch::tensor({{1., 2., 3.}}).to(torch::kFloat32)).square().sum().backward();
      optimizer.step();
    };
    const auto first = std::make_shared<Net>(), second = std::make_shared<Net>();
    for (const auto& net : {first, second}) fully_shard(net);
    Optimizer a(first->parameters(), options), b(second->parameters(), options);
    step(*first, a);
    step(*first, a);
    dcp::save({{"train", training_state(first, a)}}, path);
    StateDict state = {{"train", training_state(second, b)}};
    dcp::load(state, path);
    step(*first, a);
    step(*second, b);
    const auto wanted = first->named_parameters();
    for (const auto& item : second->named_parameters()) {
      EXPECT_TRUE(torch::equal(full(item.value()), full(wanted[item.key()]))) << item.key();
    }
  });
}

TEST(StateDicts, EveryOptimizerGoesOnAsIfNothingHadHappened) {
  using namespace torch::optim;
  expect_optimizer_continues<torch::optim::AdamW>(AdamWOptions(0.01).amsgrad(true));
  expect_optimizer_continues<torch::optim::Adam>(AdamOptions(0.01));
  expect_optimizer_continues<SGD>(SGDOptions(0.01).momentum(0.9));
  expect_optimizer_continues<SGD>(SGDOptions(0.01));
  expect_optimizer_continues<RMSprop>(RMSpropOptions(0.01).momentum(0.9).centered(true));
  expect_optimizer_continues<Adagrad>(AdagradOptions(0.01));
  expect_optimizer_continues<fsdp2::optim::AdamW>(AdamWOptions(0.01));
}

}  // namespace
}  // namespace fsdp2::state_dict_test
