#pragma once

// The checks that guard against silent errors of use can be compiled out, to measure what they
// cost: configure with -DFSDP2_CHECKS=OFF. Never ship that.

namespace fsdp2::fsdp {

#ifdef FSDP2_NO_CHECKS
constexpr bool kChecks = false;
#else
constexpr bool kChecks = true;
#endif

}  // namespace fsdp2::fsdp
