// What cannot work on a gathered parameter is an error that names it, and training goes on after
// it.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <sstream>

namespace fsdp2::testing::refused_uses_of_members {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

class RefusedUses : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, RefusedUses, ::testing::Values(1, 2));

Tensor loss(TwoLinear& module, int rank) {
  torch::manual_seed(100 + rank);
  return module->forward(torch::randn({3, 5})).pow(2).sum();
}

/// `use` must fail with all of `parts`, and leave the module as it was.
void expect_refused(const char* what, const std::function<void(TwoLinear&)>& use,
                    const std::vector<std::string>& parts = {"weight'"}) {
  Twins<TwoLinear> twins;
  wrap_layers(twins.sharded, true);
  twins.backward(loss);  // before training begins, writes go to the shards
  twins.zero_grad();
  const std::string error = error_of([&] { use(twins.sharded); });
  EXPECT_NE(error, "") << what << " was not refused";
  for (const std::string& part : parts) EXPECT_THAT(error, HasSubstr(part)) << what;
  twins.backward(loss);
  twins.expect_same(rounding_bound());
}

TEST_P(RefusedUses, WritesInPlace) {
  on_ranks(GetParam(), [](int) {
    const Tensor other = torch::randn({5, 5});
    const std::vector<std::pair<const char*, std::function<void(Tensor)>>> writes = {
        {"mul_", [](Tensor w) { w.mul_(2); }},
        {"zero_ of a row", [](Tensor w) { w[0].zero_(); }},
        {"data().mul_", [](Tensor w) { w.data().mul_(2); }},
        {"detach().add_", [](Tensor w) { w.detach().add_(1); }},
        {"copy_", [other](Tensor w) { w.copy_(other); }},
        {"out=", [other](Tensor w) { torch::add_out(w, other, other); }},
        {"index_put_", [other](Tensor w) { w.index_put_({0}, other[0]); }},
        {"foreach", [](Tensor w) { torch::_foreach_mul_({w}, 2.0); }},
        {"normal_", [](Tensor w) { w.normal_(); }},
        {"resize_", [](Tensor w) { w.detach().resize_({7, 7}); }},
        {"init", [](Tensor w) { torch::nn::init::xavier_uniform_(w); }},
        {"set_", [other](Tensor w) { w.set_(other); }},
        {"set_ of another to it", [](Tensor w) { torch::empty({0}).set_(w); }},
        {"running statistics",
         [](Tensor w) {
           torch::native_batch_norm(torch::randn({4, 5}), {}, {}, w[0], w[1], true, 0.1, 1e-5);
         }},
    };
    for (const auto& [what, write] : writes) {
      expect_refused(what, [&write = write](TwoLinear& module) {
        torch::NoGradGuard no_grad;
        write(module->b->weight);
      });
    }
    expect_refused("reset_parameters", [](TwoLinear& module) { module->b->reset_parameters(); });
  });
}

TEST_P(RefusedUses, Collectives) {
  on_ranks(GetParam(), [](int) {
    for (const char* op : {"c10d::broadcast_", "c10d::allreduce_"}) {
      expect_refused(op, [op](TwoLinear& module) {
        torch::NoGradGuard no_grad;
        std::vector<Tensor> list = {module->b->weight};
        if (std::string(op) == "c10d::broadcast_") {
          world_group()->broadcast(list)->wait();
        } else {
          world_group()->allreduce(list)->wait();
        }
      });
    }
    expect_refused("all_gather into it", [](TwoLinear& module) {
      torch::NoGradGuard no_grad;
      Tensor out = module->b->weight;
      Tensor in = torch::ones({25 / get_world_size()});
      world_group()->_allgather_base(out, in)->wait();
    });
    if (get_world_size() == 1) return;  // no communication, nothing to refuse
    expect_refused("fsdp2::all_reduce", [](TwoLinear& module) {
      torch::NoGradGuard no_grad;
      wait(all_reduce(module->b->weight, ReduceOp::kSum, world_group()));
    });
  });
}

TEST_P(RefusedUses, DirectAccessToShardedData) {
  on_ranks(GetParam(), [](int) {
    const std::vector<std::pair<const char*, std::function<void(const Tensor&)>>> reads = {
        {"data_ptr", [](const Tensor& w) { w.data_ptr(); }},
        {"const_data_ptr", [](const Tensor& w) { w.const_data_ptr<float>(); }},
        {"mutable_data_ptr", [](const Tensor& w) { w.mutable_data_ptr<float>(); }},
        {"accessor", [](const Tensor& w) { w.accessor<float, 2>()[0][0] += 1; }},
        {"data_ptr of a view", [](const Tensor& w) { w.t()[1].data_ptr<float>(); }},
        {"data_ptr of detach()", [](const Tensor& w) { w.detach().data_ptr<float>(); }},
        {"storage", [](const Tensor& w) { w.storage().mutable_data(); }},
        {"torch::save",
         [](const Tensor& w) {
           std::ostringstream out;
           torch::save(w, out);
         }},
    };
    for (const auto& [what, read] : reads) {
      expect_refused(what, [&read = read](TwoLinear& module) { read(module->b->weight); });
    }
  });
}

TEST_P(RefusedUses, ReplacedData) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    wrap_layers(module, true);
    module->b->weight.set_data(torch::randn({5, 5}));
    EXPECT_THAT(error_of([&] { module->forward(torch::ones({2, 5})).sum().backward(); }),
                AllOf(HasSubstr("weight'"), HasSubstr("set_data")));
  });
}

TEST_P(RefusedUses, ReplacedDataOfTheOnlyParameter) {
  on_ranks(GetParam(), [](int) {
    torch::nn::Linear module(torch::nn::LinearOptions(4, 3).bias(false));
    fully_shard(module);
    module->weight.set_data(torch::randn({3, 4}));
    EXPECT_THAT(error_of([&] { module(torch::ones({2, 4})).sum().backward(); }),
                HasSubstr("weight'"));
    EXPECT_NE(error_of([&] { as_fsdp(*module).unshard(); }), "");
  });
}

TEST_P(RefusedUses, ConversionAfterWrapping) {
  on_ranks(GetParam(), [](int) {
    expect_refused("to(dtype)", [](TwoLinear& m) { m->to(torch::kDouble); },
                   {"before fully_shard"});
    expect_refused("to(meta)", [](TwoLinear& m) { m->to(torch::kMeta); }, {});
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    twins.sharded->to(torch::kFloat);  // nothing to convert
    twins.sharded->to(torch::kCPU);
    twins.backward(loss);
    twins.expect_same(rounding_bound());
  });
}

TEST_P(RefusedUses, ParameterRegisteredAfterWrapping) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    wrap_layers(module, true);
    module->b->register_parameter("late", torch::ones({3}));
    EXPECT_THAT(error_of([&] { loss(module, get_rank()).backward(); }),
                AllOf(HasSubstr("late"), HasSubstr("registered after fully_shard")));
  });
}

TEST_P(RefusedUses, AliasFromBeforeWrapping) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    torch::NoGradGuard no_grad;
    Tensor cached = module->a->weight.view({25});
    EXPECT_THAT(error_of([&] { fully_shard(module); }), HasSubstr("'a.weight'"));
    EXPECT_FALSE(is_dtensor(module->parameters()[0])) << "half wrapped";
    cached.reset();
    fully_shard(module);
  });
}

TEST_P(RefusedUses, RenormalisingEmbedding) {
  on_ranks(GetParam(), [](int) {
    torch::nn::Embedding module(torch::nn::EmbeddingOptions(7, 3).max_norm(1.0));
    fully_shard(module);
    EXPECT_THAT(error_of([&] { module(torch::tensor({1, 2})); }), HasSubstr("weight'"));
  });
}

TEST_P(RefusedUses, CopiesAndSavesOfAWrappedModule) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    std::ostringstream out;
    const std::string saved = error_of([&] { torch::save(twins.sharded, out); });
    EXPECT_THAT(saved, AllOf(HasSubstr("DTensor"), HasSubstr("full_tensor")));
    std::ostringstream printed;
    EXPECT_NE(error_of([&] { printed << twins.sharded->parameters()[0]; }), "");
    printed << DTensor(twins.sharded->parameters()[0]);
    printed << *twins.sharded;  // the structure needs no data
    // A clone is refused, or is a module that works by itself.
    std::shared_ptr<torch::nn::Module> copy;
    const std::string error =
        error_of([&] { copy = torch::nn::Linear(twins.sharded->a)->clone(); });
    if (error.empty()) {
      const Tensor x = torch::ones({2, 5});
      EXPECT_EQ(difference(copy->as<torch::nn::Linear>()->forward(x), twins.plain->a(x)), 0);
    }
    twins.backward(loss);
    twins.expect_same(rounding_bound());
  });
}

}  // namespace
}  // namespace fsdp2::testing::refused_uses_of_members
