// A profiler sees each op of a wrapped module once, as in the plain one.

#include "support/ranks.h"
#include "support/twins.h"

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

}  // namespace
}  // namespace fsdp2::testing::profiler
