#include "checkpoint/optimizer_fields.h"

#include <fsdp2/optim.h>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <tuple>

namespace fsdp2::dcp {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

/// Calls `visit(name, value)` with every field, which the visitor may read or write.
template <class Visit>
void options_of_adam(auto& options, Visit&& visit) {
  visit("lr", options.lr());
  visit("betas", options.betas());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}
template <class Visit>
void fields(torch::optim::AdamOptions& options, Visit&& visit) {
  options_of_adam(options, visit);
}
template <class Visit>
void fields(torch::optim::AdamWOptions& options, Visit&& visit) {
  options_of_adam(options, visit);
}
template <class Visit>
void fields(torch::optim::SGDOptions& options, Visit&& visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("dampening", options.dampening());
  visit("weight_decay", options.weight_decay());
  visit("nesterov", options.nesterov());
}
template <class Visit>
void fields(torch::optim::RMSpropOptions& options, Visit&& visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("alpha", options.alpha());
  visit("eps", options.eps());
  visit("centered", options.centered());
  visit("weight_decay", options.weight_decay());
}
template <class Visit>
void fields(torch::optim::AdagradOptions& options, Visit&& visit) {
  visit("lr", options.lr());
  visit("lr_decay", options.lr_decay());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("initial_accumulator_value", options.initial_accumulator_value());
}

template <class Visit>
void state_of_adam(auto& state, Visit&& visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Visit>
void fields(torch::optim::AdamParamState& state, Visit&& visit) {
  state_of_adam(state, visit);
}
template <class Visit>
void fields(torch::optim::AdamWParamState& state, Visit&& visit) {
  state_of_adam(state, visit);
}
template <class Visit>
void fields(torch::optim::SGDParamState& state, Visit&& visit) {
  visit("momentum_buffer", state.momentum_buffer());
}
template <class Visit>
void fields(torch::optim::RMSpropParamState& state, Visit&& visit) {
  visit("step", state.step());
  visit("square_avg", state.square_avg());
  visit("momentum_buffer", state.momentum_buffer());
  visit("grad_avg", state.grad_avg());
}
template <class Visit>
void fields(torch::optim::AdagradParamState& state, Visit&& visit) {
  visit("step", state.step());
  visit("sum", state.sum());
}

/// Which of a class's state tensors there are with these options.
bool is_kept(torch::optim::AdamOptions& options, std::string_view name) {
  return name != "max_exp_avg_sq" || options.amsgrad();
}
bool is_kept(torch::optim::AdamWOptions& options, std::string_view name) {
  return name != "max_exp_avg_sq" || options.amsgrad();
}
bool is_kept(torch::optim::SGDOptions& options, std::string_view) {
  return options.momentum() != 0;
}
bool is_kept(torch::optim::RMSpropOptions& options, std::string_view name) {
  if (name == "momentum_buffer") return options.momentum() > 0;
  return name != "grad_avg" || options.centered();
}
bool is_kept(torch::optim::AdagradOptions&, std::string_view) { return true; }

double initial_value(auto&) { return 0; }
double initial_value(torch::optim::AdagradOptions& options) {
  return options.initial_accumulator_value();
}

// Python's values of options that C++ lacks.
StateDict more_options(const torch::optim::Adam&) {
  return {{"maximize", false},       {"foreach", None{}}, {"capturable", false},
          {"differentiable", false}, {"fused", None{}},   {"decoupled_weight_decay", false}};
}
StateDict more_options(const torch::optim::AdamW& optimizer) {
  const auto* fused = dynamic_cast<const optim::AdamW*>(&optimizer);
  return {{"maximize", fused != nullptr && fused->maximize()},
          {"foreach", None{}},
          {"capturable", false},
          {"differentiable", false},
          {"fused", None{}},
          {"decoupled_weight_decay", true}};
}
StateDict more_options(const torch::optim::SGD&) {
  return {{"maximize", false}, {"foreach", None{}}, {"differentiable", false}, {"fused", None{}}};
}
StateDict more_options(const torch::optim::RMSprop&) {
  return {
      {"capturable", false}, {"foreach", None{}}, {"maximize", false}, {"differentiable", false}};
}
StateDict more_options(const torch::optim::Adagrad&) {
  return {{"foreach", None{}}, {"maximize", false}, {"differentiable", false}, {"fused", None{}}};
}

Value option_value(bool value) { return value; }
Value option_value(double value) { return value; }
Value option_value(const std::tuple<double, double>& value) {
  return Tuple{{std::get<0>(value), std::get<1>(value)}};
}

/// A number, also from a 0-dim tensor, as Python keeps a learning rate sometimes.
double number(const Value& value) {
  return value.is_tensor() ? value.to_tensor().item<double>() : value.to_double();
}
void take(bool& to, const Value& value) { to = value.to_bool(); }
void take(double& to, const Value& value) { to = number(value); }
void take(std::tuple<double, double>& to, const Value& value) {
  TORCH_CHECK_VALUE(value.items().size() == 2, "betas must be two numbers");
  to = {number(value.items()[0]), number(value.items()[1])};
}

template <class Optimizer, class Options, class State>
class FieldsOf : public OptimizerFields {
 public:
  StateDict options(const torch::optim::Optimizer& optimizer,
                    OptimizerOptions& options) const override {
    StateDict values;
    fields(static_cast<Options&>(options),
           [&](const char* name, auto& value) { values[name] = option_value(value); });
    for (auto& [name, value] : more_options(static_cast<const Optimizer&>(optimizer))) {
      values[name] = value;
    }
    return values;
  }

  bool has_option(const std::string& name) const override {
    Options any(0);
    bool found = false;
    fields(any, [&](const char* field, auto&) { found = found || name == field; });
    return found;
  }

  void set_options(OptimizerOptions& options, const StateDict& values) const override {
    fields(static_cast<Options&>(options), [&](const char* name, auto& value) {
      if (const Value* given = values.find(name)) take(value, *given);
    });
  }

  StateDict state(OptimizerParamState& state) const override {
    StateDict values;
    fields(static_cast<State&>(state), [&](const char* name, auto& value) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, torch::Tensor>) {
        if (value.defined()) values[name] = value;
      } else {
        values[name] = torch::scalar_tensor(value, torch::kFloat32);
      }
    });
    return values;
  }

  StateDict fresh_state(const torch::Tensor& parameter, OptimizerOptions& options) const override {
    torch::NoGradGuard no_grad;
    StateDict values;
    State empty;
    auto& typed = static_cast<Options&>(options);
    fields(empty, [&](const char* name, auto& value) {
      if (!is_kept(typed, name)) return;
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, torch::Tensor>) {
        values[name] = torch::full_like(parameter.detach(), initial_value(typed));
      } else {
        values[name] = torch::scalar_tensor(0, torch::kFloat32);
      }
    });
    return values;
  }

  std::unique_ptr<OptimizerParamState> make_state(const StateDict& values) const override {
    auto state = std::make_unique<State>();
    fields(*state, [&](const char* name, auto& value) {
      const Value* given = values.find(name);
      if (given == nullptr || given->is_none()) return;
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, torch::Tensor>) {
        value = given->to_tensor();
      } else {
        value = static_cast<int64_t>(number(*given));
      }
    });
    return state;
  }
};

}  // namespace

const OptimizerFields& OptimizerFields::of(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  static const FieldsOf<AdamW, AdamWOptions, AdamWParamState> adamw;
  static const FieldsOf<Adam, AdamOptions, AdamParamState> adam;
  static const FieldsOf<SGD, SGDOptions, SGDParamState> sgd;
  static const FieldsOf<RMSprop, RMSpropOptions, RMSpropParamState> rmsprop;
  static const FieldsOf<Adagrad, AdagradOptions, AdagradParamState> adagrad;
  if (dynamic_cast<const AdamW*>(&optimizer) != nullptr) return adamw;
  if (dynamic_cast<const Adam*>(&optimizer) != nullptr) return adam;
  if (dynamic_cast<const SGD*>(&optimizer) != nullptr) return sgd;
  if (dynamic_cast<const RMSprop*>(&optimizer) != nullptr) return rmsprop;
  if (dynamic_cast<const Adagrad*>(&optimizer) != nullptr) return adagrad;
  TORCH_CHECK_TYPE(false,
                   "the state of this optimizer's class has no names: Adam, AdamW, SGD, RMSprop "
                   "and Adagrad have");
}

}  // namespace fsdp2::dcp
