// What the bytes of a gathered parameter are: aligned as the allocator aligns, fetched only when
// data is needed, and there for ops that look at data before they dispatch.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <sstream>

namespace fsdp2::testing::gathered_data {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class GatheredData : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, GatheredData, ::testing::Values(1, 2, 3));

struct OddSizesImpl : torch::nn::Module {
  std::vector<Tensor> members;
  OddSizesImpl() {
    for (int64_t size : {1, 3, 7, 17, 5}) {
      members.push_back(register_parameter("p" + std::to_string(size), torch::randn({size, size})));
    }
    members.push_back(register_parameter("half", torch::randn({3, 5}).to(torch::kBFloat16)));
    members.push_back(register_parameter("scalar", torch::tensor(1.0)));
  }
};
TORCH_MODULE(OddSizes);

TEST_P(GatheredData, IsAlignedTo64Bytes) {
  on_ranks(GetParam(), [](int) {
    OddSizes module;
    FSDPModule controls = fully_shard(module);
    controls.unshard();
    for (const Tensor& member : module->members) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(member.data_ptr()) % 64, 0U) << member.sizes();
    }
  });
}

TEST_P(GatheredData, IsNotFetchedForSizes) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    FSDPModule controls = fully_shard(module);
    const Tensor w = module->a->weight;
    torch::NoGradGuard no_grad;
    torch::empty_like(w);
    torch::zeros_like(w);
    w.new_zeros({2});
    w.t().detach().t().view({25}).narrow(0, 1, 3).expand({2, 3});
    EXPECT_EQ(w.size(0) + w.numel() + w.dim() + w.stride(0), 5 + 25 + 2 + 5);
    EXPECT_FALSE(controls.is_unsharded());
    EXPECT_FALSE(w.is_pinned());
    EXPECT_EQ(w.to(torch::kMeta).numel(), 25);
    EXPECT_EQ(difference(torch::ones_like(w), torch::ones({5, 5})), 0);
  });
}

TEST_P(GatheredData, IsThereForOpsThatReadBeforeTheyDispatch) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    torch::NoGradGuard no_grad;
    auto same = [&](const char* what, const std::function<Tensor(TwoLinear&)>& use) {
      for (const auto& below : twins.sharded->modules()) {
        if (is_fsdp(*below)) as_fsdp(*below).reshard();
      }
      EXPECT_EQ(difference(use(twins.sharded), use(twins.plain)), 0) << what;
    };
    same("max_pool1d", [](TwoLinear& m) { return torch::max_pool1d(m->a->weight, 2); });
    same("item", [](TwoLinear& m) { return torch::tensor(m->a->weight[1][2].item<double>()); });
    same("to double", [](TwoLinear& m) { return m->a->weight.to(torch::kDouble); });
    same("equal", [](TwoLinear& m) {
      return torch::tensor(torch::equal(m->a->weight, m->a->weight.clone()));
    });
    same("nonzero", [](TwoLinear& m) { return m->a->weight.nonzero(); });
    same("print", [](TwoLinear& m) {
      std::ostringstream out;
      out << m->a->weight;
      return torch::tensor(static_cast<int64_t>(std::hash<std::string>()(out.str()) % 1000003));
    });
    same("cat of two groups",
         [](TwoLinear& m) { return torch::cat({m->a->weight, m->b->weight, m->a->weight.t()}); });
    same("numel of one_hot",
         [](TwoLinear& m) { return torch::one_hot(m->a->weight.argmax(1), 5); });
  });
}

TEST_P(GatheredData, CanBeUsedRawWhileUnsharded) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    FSDPModule a = as_fsdp(*twins.sharded->a);
    a.unshard();
    torch::NoGradGuard no_grad;
    twins.sharded->b(torch::ones({1, 5}));  // another group's gather leaves it alone
    auto ours = twins.sharded->a->weight.accessor<float, 2>();
    auto plain = twins.plain->a->weight.accessor<float, 2>();
    for (int i = 0; i < 5; ++i) EXPECT_EQ(ours[i][4], plain[i][4]);
    std::stringstream file;
    torch::save(twins.sharded->a->weight, file);
    Tensor loaded;
    torch::load(loaded, file);
    EXPECT_EQ(difference(loaded, twins.plain->a->weight), 0);
    a.reshard();
    EXPECT_THAT(error_of([&] { twins.sharded->a->weight.accessor<float, 2>(); }),
                HasSubstr("weight'"));
  });
}

}  // namespace
}  // namespace fsdp2::testing::gathered_data
