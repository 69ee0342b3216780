#include "checkpoint/load_report.h"

#include "checkpoint/blocks.h"
#include "checkpoint/conversion.h"
#include "checkpoint/dtypes.h"
#include "checkpoint/near_names.h"
#include "dtensor/tensor_impl.h"

#include <fsdp2/dtensor.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

namespace fsdp2::dcp {
namespace {

using Json = nlohmann::json;

LoadReport merged(const std::vector<std::string>& reports) {
  std::set<std::string> missing, converted;
  std::vector<std::string> unexpected;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const Json json = Json::parse(reports[rank]);
    for (const auto& key : json[0]) missing.insert(key.get<std::string>());
    for (const auto& key : json[2]) converted.insert(key.get<std::string>());
    auto of_rank = json[1].get<std::vector<std::string>>();
    std::sort(of_rank.begin(), of_rank.end());
    if (rank == 0) {
      unexpected = std::move(of_rank);
      continue;
    }
    std::vector<std::string> both;
    std::set_intersection(unexpected.begin(), unexpected.end(), of_rank.begin(), of_rank.end(),
                          std::back_inserter(both));
    unexpected = std::move(both);
  }
  return {{missing.begin(), missing.end()}, unexpected, {converted.begin(), converted.end()}};
}

}  // namespace

void check_conversion(const std::string& key, torch::ScalarType from, torch::ScalarType to,
                      bool allow_narrowing, LoadReport& report) {
  const Conversion kind = conversion(from, to);
  if (kind == Conversion::kNone) return;
  const std::string what = c10::str(dtype_name(from), " to ", dtype_name(to));
  TORCH_CHECK_VALUE(kind != Conversion::kImpossible, "it cannot be converted from ", what);
  TORCH_CHECK_VALUE(kind != Conversion::kRounding || allow_narrowing, key, ": converting it from ",
                    what, " would round; allow_narrowing does it");
  report.converted.push_back(key + ": " + what);
}

void check_missing(const std::vector<std::string>& missing, const std::vector<std::string>& saved,
                   bool any_found, bool allow_partial) {
  if (missing.empty() || (allow_partial && any_found)) return;
  const std::string near = near_names(missing[0], saved);
  TORCH_CHECK_VALUE(allow_partial, "the checkpoint lacks ", short_list(missing), near,
                    " (allow_partial leaves what is missing as it is)");
  TORCH_CHECK_VALUE(false, "the checkpoint has none of the keys asked for, ", short_list(missing),
                    near);
}

LoadReport agreed_report(const Exchange& exchange, const std::function<LoadReport()>& body) {
  return merged(exchange.all([&] {
    const LoadReport report = body();
    return Json{report.missing, report.unexpected, report.converted}.dump();
  }));
}

void announce_write(const torch::Tensor& tensor) {
  if (is_dtensor(tensor)) dtensor::announce_write(tensor);
  const torch::Tensor data = data_of(tensor);
  if (!data.is_inference()) data.unsafeGetTensorImpl()->bump_version();
}

}  // namespace fsdp2::dcp
