#include "dtensor/operands.h"
#include "dtensor/rules.h"

namespace fsdp2::dtensor {
namespace {

template <Linearity kind>
void pointwise(Call& call) {
  run_pointwise(call, kind);
}

constexpr std::string_view kWithInPlaceForm =
    "abs acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not "
    "bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min copysign cos cosh deg2rad digamma "
    "elu eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmod frac ge gelu gt "
    "hardsigmoid hardswish hardtanh heaviside hypot le leaky_relu lerp lgamma log log10 log1p "
    "log2 logical_and logical_not logical_or logical_xor logit lt masked_fill mish nan_to_num ne "
    "nextafter pow rad2deg reciprocal relu remainder round rsqrt sgn sigmoid sign silu sin sinc "
    "sinh sqrt tan tanh threshold trunc xlogy";

constexpr std::string_view kOther =
    "elu_backward fmax fmin gelu_backward hardshrink hardshrink_backward hardsigmoid_backward "
    "hardswish_backward hardtanh_backward i0 isinf isnan isneginf isposinf leaky_relu_backward "
    "logaddexp logaddexp2 maximum minimum mish_backward mvlgamma polygamma pow.Scalar "
    "sigmoid_backward signbit silu_backward softplus softplus_backward softshrink "
    "softshrink_backward special_entr special_erfcx special_log_ndtr special_ndtri "
    "special_xlog1py tanh_backward threshold_backward where";

}  // namespace

RuleTable pointwise_rules() {
  RuleTable table;
  add_rules(table, pointwise<Linearity::kAdditive>, "add sub", /*in_place_too=*/true);
  add_rules(table, pointwise<Linearity::kAdditive>, "rsub");
  add_rules(table, pointwise<Linearity::kScaling>, "mul div", /*in_place_too=*/true);
  add_rules(table, pointwise<Linearity::kUnary>, "neg", /*in_place_too=*/true);
  add_rules(table, pointwise<Linearity::kUnary>, "zero_");
  add_rules(table, pointwise<Linearity::kNone>,
            "div.Tensor_mode div_.Tensor_mode div.Scalar_mode div_.Scalar_mode");
  add_rules(table, pointwise<Linearity::kNone>, kWithInPlaceForm, /*in_place_too=*/true);
  add_rules(table, pointwise<Linearity::kNone>, kOther);
  return table;
}

}  // namespace fsdp2::dtensor
