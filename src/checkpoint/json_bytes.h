#pragma once

// What ranks tell each other, as JSON in MessagePack.

#include <fsdp2/dcp_metadata.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fsdp2::dcp {

inline std::string to_bytes(const nlohmann::json& json) {
  const std::vector<uint8_t> bytes = nlohmann::json::to_msgpack(json);
  return {bytes.begin(), bytes.end()};
}

inline nlohmann::json json_of(const std::vector<PathPart>& path) {
  nlohmann::json json = nlohmann::json::array();
  for (const PathPart& part : path) {
    std::visit([&](const auto& value) { json.push_back(value); }, part);
  }
  return json;
}

inline std::vector<PathPart> path_of(const nlohmann::json& json) {
  std::vector<PathPart> path;
  for (const nlohmann::json& part : json) {
    if (part.is_string()) {
      path.emplace_back(part.get<std::string>());
    } else {
      path.emplace_back(part.get<int64_t>());
    }
  }
  return path;
}

}  // namespace fsdp2::dcp
