// Every ATen op that can be called from its schema alone, each tensor argument in turn a gathered
// parameter that is freed again after every op inside: forward and backward as in plain torch. An
// ordinary run takes a sample; FSDP2_FUZZ_SECONDS takes as many as fit.

#include "support/errors.h"
#include "support/fuzz.h"
#include "support/op_arguments.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fsdp2::testing::op_sweep {
namespace {

using c10::IValue;
using c10::TypeKind;
using torch::Tensor;
using Stack = std::vector<IValue>;

bool is_optional_list(const IValue& value) {
  return value.isList() && value.toList().elementType()->kind() == TypeKind::OptionalType;
}

Stack copy(const Stack& stack) {
  Stack out;
  for (const IValue& value : stack) {
    if (value.isTensor()) {
      out.emplace_back(value.toTensor().clone());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list = value.toTensorVector();
      for (Tensor& tensor : list) tensor = tensor.clone();
      out.emplace_back(list);
    } else if (is_optional_list(value)) {
      c10::List<std::optional<Tensor>> list;
      for (const IValue& element : value.toListRef()) list.push_back(element.toTensor().clone());
      out.emplace_back(list);
    } else {
      out.push_back(value);
    }
  }
  return out;
}

Tensor at_slot(const Stack& stack, const Slot& slot) {
  const IValue& value = stack[slot.argument];
  return slot.element < 0 ? value.toTensor()
                          : value.toListRef()[static_cast<size_t>(slot.element)].toTensor();
}

void put(Stack& stack, const Slot& slot, const Tensor& tensor) {
  IValue& value = stack[slot.argument];
  if (slot.element < 0) {
    value = tensor;
  } else if (value.isTensorList()) {
    std::vector<Tensor> list = value.toTensorVector();
    list[static_cast<size_t>(slot.element)] = tensor;
    value = list;
  } else {
    c10::List<std::optional<Tensor>> list;
    list.push_back(tensor);
    value = list;
  }
}

/// What differs between two results; "" if nothing does.
std::string compare(const IValue& a, const IValue& b) {
  if (a.isTensor() && b.isTensor()) {
    Tensor x = a.toTensor(), y = b.toTensor();
    if (!x.defined() && !y.defined()) return "";
    if (x.defined() != y.defined()) return "one is undefined";
    if (x.scalar_type() != y.scalar_type()) return "dtypes differ";
    if (x.layout() != y.layout()) return "layouts differ";
    if (x.is_nested() || x.is_mkldnn()) return "";
    if (x.sizes() != y.sizes()) return "sizes differ";
    if (x.layout() == torch::kStrided && x.strides() != y.strides()) return "strides differ";
    x = x.is_quantized() ? x.dequantize() : x.layout() == torch::kStrided ? x : x.to_dense();
    y = y.is_quantized() ? y.dequantize() : y.layout() == torch::kStrided ? y : y.to_dense();
    x = x.detach().to(torch::kComplexDouble);
    y = y.detach().to(torch::kComplexDouble);
    return torch::allclose(x, y, 0, 0, /*equal_nan=*/true) ? "" : "values differ";
  }
  if (a.isList() && b.isList()) {
    const auto x = a.toListRef(), y = b.toListRef();
    if (x.size() != y.size()) return "lengths differ";
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::string found = compare(x[i], y[i]); !found.empty()) return found;
    }
    return "";
  }
  if (a.isDouble() && b.isDouble()) {
    return a.toDouble() == b.toDouble() || std::isnan(a.toDouble()) ? "" : "numbers differ";
  }
  if (a.isInt() && b.isInt()) return a.toInt() == b.toInt() ? "" : "integers differ";
  if (a.isBool() && b.isBool()) return a.toBool() == b.toBool() ? "" : "answers differ";
  return "";
}

std::string compare(const Stack& a, const Stack& b) {
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (std::string found = compare(a[i], b[i]); !found.empty()) return found;
  }
  return "";
}

void run(const c10::OperatorHandle& op, Stack& stack) {
  torch::manual_seed(9);
  op.callBoxed(stack);
}

/// A scalar of all differentiable results.
Tensor loss_of(const Stack& results) {
  Tensor loss;
  auto add = [&](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad() || tensor.is_nested()) return;
    Tensor term = tensor.is_complex() ? tensor.abs().sum() : tensor.sin().sum();
    loss = loss.defined() ? loss + term : term;
  };
  for (const IValue& value : results) {
    if (value.isTensor()) add(value.toTensor());
    if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) add(tensor);
    }
  }
  return loss;
}

/// A tensor as the only parameter of a wrapped module.
struct Wrapped {
  std::shared_ptr<torch::nn::Module> module = std::make_shared<torch::nn::Module>();
  Tensor member;
  explicit Wrapped(const Tensor& value, bool requires_grad) {
    member = module->register_parameter("weight", value.clone(), requires_grad);
    fully_shard(module);
  }
  ~Wrapped() { freed() = nullptr; }
  Tensor shard() const { return module->parameters()[0]; }
  /// What is freed after each op of this thread.
  static torch::nn::Module*& freed() {
    static torch::nn::Module* module = nullptr;
    return module;
  }
};

void free_after_every_op() {
  at::RecordFunctionCallback after_op(
      [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; },
      [](const at::RecordFunction&, at::ObserverContext*) {
        if (Wrapped::freed()) as_fsdp(*Wrapped::freed()).reshard();
      });
  at::addThreadLocalCallback(after_op.scopes({at::RecordScope::FUNCTION}));
  at::enableRecordFunction(true);
}

/// What a worker is at, for the process that watches it.
struct Progress {
  size_t next = 0;
  bool ours = false;  // running on a parameter, not plain
  int exercised = 0;
  char at[256] = {};
  char findings[1 << 16] = {};

  void report(const std::string& line) {
    const size_t used = std::strlen(findings);
    std::strncpy(findings + used, (line + "\n").c_str(), sizeof findings - used - 1);
  }
};

class OpSweep {
 public:
  OpSweep(const c10::OperatorHandle& op, Progress& progress) : op_(op), progress_(progress) {
    for (const c10::Argument& argument : op.schema().arguments()) {
      writes_ = writes_ || (argument.alias_info() && argument.alias_info()->isWrite());
    }
  }

  void sweep() {
    bool any = false;
    for (int tensors = 0; tensors < kTensorFillings; ++tensors) any = sweep(tensors) || any;
    progress_.exercised += any;
  }

 private:
  /// True if the op takes such tensors.
  bool sweep(int tensors) {
    static const std::vector<std::vector<int64_t>> lists = {
        {1}, {1, 1}, {0}, {2, 2}, {4, 4}, {}, {1, 1, 1, 1}, {0, 1}, {1, 0}};
    for (int64_t integer : {0, 1, 2}) {
      for (const auto& integers : lists) {
        torch::manual_seed(5);
        auto filled = fill_arguments(op_.schema(), {tensors, integer, integers});
        if (!filled) return false;
        Stack results = copy(filled->first), again = copy(filled->first);
        bool repeats = false;
        if (!error_of([&] {
               torch::NoGradGuard no_grad;
               run(op_, results);
               run(op_, again);
               repeats = compare(results, again).empty();
             }).empty()) {
          continue;
        }
        if (!repeats) return false;
        for (const Slot& slot : filled->second) {
          const auto* alias = op_.schema().arguments()[slot.argument].alias_info();
          if ((alias && alias->isWrite()) || at_slot(filled->first, slot).numel() == 0) continue;
          mark("plain", tensors, slot);
          forward(filled->first, slot, results, tensors);
          if (!writes_ && at_slot(filled->first, slot).is_floating_point()) {
            backward(filled->first, slot, tensors);
          }
          progress_.ours = false;
        }
        return true;
      }
    }
    return false;
  }

  void mark(const char* phase, int tensors, const Slot& slot) {
    where_ = op_.schema().name() + "." + op_.schema().overload_name() + ", tensors " +
             std::to_string(tensors) + ", argument " +
             op_.schema().arguments()[slot.argument].name();
    std::snprintf(progress_.at, sizeof progress_.at, "%s (%s)", where_.c_str(), phase);
  }

  void report(const std::string& what, const Slot& slot) {
    const std::string& argument = op_.schema().arguments()[slot.argument].name();
    if (!what.empty() && said_.insert(argument + what).second) {
      progress_.report(where_ + ": " + what.substr(0, 300));
    }
  }

  void forward(const Stack& arguments, const Slot& slot, const Stack& expected, int tensors) {
    Wrapped wrapped(at_slot(arguments, slot), /*requires_grad=*/false);
    Stack stack = copy(arguments);
    put(stack, slot, wrapped.member);
    mark("forward", tensors, slot);
    progress_.ours = true;
    std::string found;
    const std::string error = error_of([&] {
      Wrapped::freed() = wrapped.module.get();
      torch::NoGradGuard no_grad;
      run(op_, stack);
      found = compare(expected, stack);
    });
    Wrapped::freed() = nullptr;
    progress_.ours = false;
    report(error.empty() ? found : error, slot);
  }

  void backward(const Stack& arguments, const Slot& slot, int tensors) {
    Tensor expected;
    auto plain = [&] {
      Stack stack = copy(arguments);
      Tensor leaf = at_slot(stack, slot).detach().requires_grad_();
      put(stack, slot, leaf);
      run(op_, stack);
      Tensor loss = loss_of(stack);
      if (loss.defined()) loss.backward();
      return leaf.grad();
    };
    bool repeats = false;
    if (!error_of([&] {
           expected = plain();
           repeats = expected.defined() && compare(IValue(expected), IValue(plain())).empty();
         }).empty()) {
      return;
    }
    if (!repeats) return;
    Wrapped wrapped(at_slot(arguments, slot), /*requires_grad=*/true);
    Stack stack = copy(arguments);
    put(stack, slot, wrapped.member);
    mark("backward", tensors, slot);
    progress_.ours = true;
    std::string found;
    const std::string error = error_of([&] {
      Wrapped::freed() = wrapped.module.get();
      run(op_, stack);
      loss_of(stack).backward();
      Wrapped::freed() = nullptr;
      const Tensor gradient = wrapped.shard().grad();
      if (!gradient.defined()) {
        found = "no gradient";
      } else {
        const Tensor dense = expected.layout() == torch::kStrided ? expected : expected.to_dense();
        if (difference(full(gradient), dense) > 0) found = "gradients differ";
      }
    });
    Wrapped::freed() = nullptr;
    progress_.ours = false;
    report(error.empty() ? found : "backward: " + error, slot);
  }

  const c10::OperatorHandle& op_;
  Progress& progress_;
  bool writes_ = false;
  std::string where_;
  std::set<std::string> said_;
};

/// Ops that are random, need a device, change autograd's own state, are not functions of their
/// tensors, or read past their end if the sizes do not fit together.
bool excluded(const std::string& name) {
  if (!name.starts_with("aten::")) return true;
  for (const char* part : {"empty",
                           "rand",
                           "bernoulli",
                           "dropout",
                           "set_data",
                           "requires_grad_",
                           "retain_grad",
                           "resize",
                           "uniform",
                           "normal",
                           "multinomial",
                           "poisson",
                           "exponential",
                           "geometric",
                           "cauchy",
                           "random",
                           "_sobol",
                           "cudnn",
                           "miopen",
                           "_test",
                           "_foreach_add_",
                           "record_stream",
                           "_print",
                           "_assert",
                           "wait_tensor",
                           "hash",
                           "_cslt",
                           "_propagate_xla",
                           "is_pinned",
                           "pin_memory",
                           "_indices",
                           "sparse_resize",
                           "from_file",
                           "_thnn_differentiable",
                           "lstsq",
                           "_pdist_backward",
                           "_log_softmax_backward"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

std::vector<c10::OperatorHandle> ops() {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  std::set<std::string> names;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (excluded(name.name)) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->schema().arguments().empty()) continue;
    const auto* alias = op->schema().arguments()[0].alias_info();
    const bool out = name.overload_name.find("out") != std::string::npos;
    if (out || (alias && alias->isWrite() && op->schema().arguments().size() < 2)) continue;
    found.push_back(*op);
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.schema().name(), a.schema().overload_name()) <
           std::make_pair(b.schema().name(), b.schema().overload_name());
  });
  return found;
}

/// Refused on purpose: the op would keep the parameter's memory, or write to it.
bool is_meant(const std::string& finding) {
  const bool keeps = finding.starts_with("aten::set_") || finding.starts_with("aten::set.") ||
                     finding.find("batch_norm") != std::string::npos;
  return keeps && (finding.find("writes to (or keeps the memory of) the gathered parameter") !=
                       std::string::npos ||
                   finding.find("is sharded: its data is here only") != std::string::npos);
}

[[noreturn]] void work(const std::vector<c10::OperatorHandle>& all, Progress& progress,
                       bool quiet) {
  torch::set_num_threads(1);
  if (quiet) (void)!freopen("/dev/null", "w", stderr);
  free_after_every_op();
  while (progress.next < all.size()) {
    alarm(20);
    const std::string error = error_of([&] { OpSweep(all[progress.next], progress).sweep(); });
    if (!error.empty()) progress.report(std::string(progress.at) + ": the sweep itself: " + error);
    ++progress.next;
  }
  _exit(0);
}

TEST(OpSweep, EveryOpTakesGatheredParameters) {
  const bool sampled = fuzz_time().count() == 0;
  std::vector<c10::OperatorHandle> all = ops();
  ASSERT_GT(all.size(), 1500U);
  Dice dice(first_seed());
  std::shuffle(all.begin(), all.end(), dice.engine());
  if (sampled) all.erase(all.begin() + 150, all.end());
  if (const char* only = std::getenv("FSDP2_SWEEP_OP")) {
    all = ops();
    std::erase_if(all, [&](const auto& op) { return op.schema().name() != only; });
  }

  void* shared =
      mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& progress = *new (shared) Progress;
  const auto end = std::chrono::steady_clock::now() + fuzz_time();
  while (progress.next < all.size() && (sampled || std::chrono::steady_clock::now() < end)) {
    const pid_t worker = fork();
    ASSERT_GE(worker, 0);
    if (worker == 0) work(all, progress, /*quiet=*/true);
    int status = 0;
    waitpid(worker, &status, 0);
    if (!WIFSIGNALED(status)) continue;
    // Some plain ops crash on arguments that only fit their schema; that is theirs.
    if (progress.ours) {
      progress.report(std::string(progress.at) + ": died of signal " +
                      std::to_string(WTERMSIG(status)));
    }
    progress.ours = false;
    ++progress.next;
  }
  std::istringstream findings(progress.findings);
  for (std::string line; std::getline(findings, line);) {
    if (!line.empty() && !is_meant(line)) ADD_FAILURE() << line;
  }
  std::cout << progress.exercised << " of " << progress.next << " ops exercised" << std::endl;
  if (sampled && all.size() > 100) {
    EXPECT_GT(progress.exercised, 60);
  }
  munmap(shared, sizeof(Progress));
}

}  // namespace
}  // namespace fsdp2::testing::op_sweep
