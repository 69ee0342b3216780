#pragma once

// What loads of all formats check and report.

#include "checkpoint/exchange.h"

#include <fsdp2/dcp.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp2::dcp {

/// Error, for the caller to say of which key, if the conversion is not allowed; else notes it.
void check_conversion(const std::string& key, torch::ScalarType from, torch::ScalarType to,
                      bool allow_narrowing, LoadReport& report);

/// Error if keys are missing that may not be; `any_found`: whether anything asked for is there.
void check_missing(const std::vector<std::string>& missing, const std::vector<std::string>& saved,
                   bool any_found, bool allow_partial);

/// What all ranks report, as one: missing and converted anywhere, unexpected everywhere.
/// Collective.
LoadReport agreed_report(const Exchange& exchange, const std::function<LoadReport()>& body);

/// To be called before a tensor's elements are written around its ops.
void announce_write(const torch::Tensor& tensor);

}  // namespace fsdp2::dcp
