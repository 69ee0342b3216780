#include "dispatch/backward.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace fsdp2::dispatch {
namespace {

/// Owned by the engine's callback alone. If the graph task dies by an exception the callback is
/// destroyed unrun, and this with it: that is how a failed backward is noticed.
struct Ending {
  Ending(std::function<void()> ended, std::function<void()> failed)
      : ended(std::move(ended)), failed(std::move(failed)) {}
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;
  ~Ending() {
    if (!done) failed();
  }
  std::function<void()> ended, failed;
  bool done = false;
};

/// Runs a callback once the node it is put on has run.
struct AfterNode final : torch::autograd::FunctionPostHook {
  explicit AfterNode(std::function<void()> run) : run(std::move(run)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (auto once = std::exchange(run, nullptr)) once();
    return outputs;
  }
  std::function<void()> run;
};

void queue(std::shared_ptr<Ending> ending) {
  torch::autograd::Engine::get_default_engine().queue_callback([ending = std::move(ending)] {
    // The end of a backward that runs inside another's node is not the end: wait for the outer one.
    if (auto node = torch::autograd::get_current_node()) {
      node->add_post_hook(std::make_unique<AfterNode>([ending] { queue(ending); }));
      return;
    }
    ending->ended();
    ending->done = true;
  });
}

}  // namespace

void at_end_of_backward(std::function<void()> ended, std::function<void()> failed) {
  queue(std::make_shared<Ending>(std::move(ended), std::move(failed)));
}

}  // namespace fsdp2::dispatch
