// Two threads in one wrapped module: two forwards without gradient work, also when they free each
// other's parameters; two backwards at once are refused.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <atomic>
#include <thread>

namespace fsdp2::testing::threads {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

TEST(Threads, TwoForwardsWithoutGradient) {
  on_ranks(1, [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    const Tensor x = torch::randn({16, 5});
    Tensor expected;
    {
      torch::NoGradGuard no_grad;
      expected = twins.plain->forward(x);
    }
    std::atomic<int> wrong = 0, errors = 0;
    auto work = [&] {
      torch::NoGradGuard no_grad;
      for (int i = 0; i < 400; ++i) {
        const std::string error = error_of([&] {
          if (difference(twins.sharded->forward(x), expected) != 0) ++wrong;
          if (i % 3 == 0) as_fsdp(*twins.sharded->a).reshard();
        });
        if (!error.empty() && errors++ == 0) ADD_FAILURE() << error;
      }
    };
    std::thread first(work), second(work);
    first.join();
    second.join();
    EXPECT_EQ(wrong, 0);
  });
}

/// Holds a backward in the middle until `released`.
struct Hold : torch::autograd::Function<Hold> {
  static std::atomic<bool> reached, released;
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    reached = true;
    while (!released) std::this_thread::yield();
    return gradients;
  }
};
std::atomic<bool> Hold::reached = false, Hold::released = false;

TEST(Threads, TwoBackwardsAtOnceAreRefusedAndTheFirstIsRight) {
  on_ranks(1, [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    const Tensor x = torch::randn({4, 5});
    twins.plain->forward(x).sum().backward();
    Tensor other = twins.sharded->forward(x).sum();
    std::thread first(
        [&] { twins.sharded->b(Hold::apply(torch::tanh(twins.sharded->a(x)))).sum().backward(); });
    while (!Hold::reached) std::this_thread::yield();
    EXPECT_THAT(error_of([&] { other.backward(); }), HasSubstr("two threads run backward"));
    Hold::released = true;
    first.join();
    twins.expect_same(0);
  });
}

TEST(Threads, BackwardInAnotherThreadThanForward) {
  for (int world : {1, 2}) {
    on_ranks(world, [](int) {
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, true);
      for (int step = 0; step < 3; ++step) {
        twins.zero_grad();
        for (auto* module : twins.both()) {
          Tensor loss = (*module)->forward(torch::ones({4, 5})).pow(2).sum();
          std::thread([&] { loss.backward(); }).join();
        }
        twins.expect_same(rounding_bound());
      }
    });
  }
}

}  // namespace
}  // namespace fsdp2::testing::threads
