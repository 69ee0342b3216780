// A profiler sees each op of a wrapped module once, as in the plain one, and what the library does
// between them.

#include "support/ranks.h"
#include "support/twins.h"

#include <fsdp2/clip_grad.h>
#include <fsdp2/optim.h>

#include <ATen/record_function.h>

#include <map>

namespace fsdp2::testing::profiler {
namespace {

using torch::Tensor;

std::map<std::string, int>& seen() {
  static std::map<std::string, int> counts;
  return counts;
}

TEST(Profiler, SeesEachOpOnce) {
  on_ranks(1, [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          ++seen()[function.name()];
          return nullptr;
        }));
    std::array<std::map<std::string, int>, 2> counts;
    for (size_t i = 0; i < 2; ++i) {
      as_fsdp(*twins.sharded->a).unshard();
      as_fsdp(*twins.sharded->b).unshard();
      const Tensor x = torch::ones({3, 5});
      at::enableRecordFunction(true);
      seen().clear();
      (*twins.both()[i])->forward(x);
      counts[i] = seen();
      at::enableRecordFunction(false);
    }
    EXPECT_EQ(counts[1], counts[0]);
    EXPECT_EQ(counts[0]["aten::addmm"], 2);
    at::clearThreadLocalCallbacks();
  });
}

std::vector<std::string>& ranges() {
  static std::vector<std::string> names;
  return names;
}

TEST(Profiler, SeesTheLibrarysRanges) {
  on_ranks(2, [](int rank) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    optim::AdamW optimizer(twins.sharded->parameters(), torch::optim::AdamWOptions(1e-3));
    EXPECT_FALSE(at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE));
    at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          ranges().emplace_back(function.name());
          return nullptr;
        }).scopes({at::RecordScope::USER_SCOPE}));
    twins.sharded->forward(torch::full({2, 5}, 0.1 + rank)).sum().backward();
    clip_grad_norm_(twins.sharded->parameters(), 1.0);
    optimizer.step();
    at::clearThreadLocalCallbacks();
    const std::vector<std::string> expected = {
        "fsdp2::gather a.weight, ...",  // as the root calls it, which was wrapped last
        "fsdp2::wait gather a.weight, ...",
        "fsdp2::gather b.weight, ...",
        "fsdp2::wait gather b.weight, ...",
        "fsdp2::reduce b.weight, ...",
        "fsdp2::wait reduce b.weight, ...",
        "fsdp2::reduce a.weight, ...",
        "fsdp2::wait reduce a.weight, ...",
        "fsdp2::clip_grad_norm_",
        "fsdp2::wait norm",
        "fsdp2::optimizer"};
    EXPECT_EQ(ranges(), expected);
  });
}

}  // namespace
}  // namespace fsdp2::testing::profiler
