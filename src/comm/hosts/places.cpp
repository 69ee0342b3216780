#include "comm/hosts/places.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace fsdp2::comm {

bool any_share_a_host(const std::vector<std::string>& hosts) {
  return std::set<std::string>(hosts.begin(), hosts.end()).size() < hosts.size();
}

HostPlaces::HostPlaces(std::vector<std::string> host_names, int own_rank)
    : names(std::move(host_names)), rank(own_rank) {
  std::map<std::string, size_t> numbers;
  for (size_t other = 0; other < names.size(); ++other) {
    const size_t at = numbers.emplace(names[other], members.size()).first->second;
    if (at == members.size()) members.emplace_back();
    if (static_cast<int>(other) == rank) {
      host = at;
      index = members[at].size();
    }
    index_of_.push_back(members[at].size());
    members[at].push_back(static_cast<int>(other));
  }
  carried.resize(mates().size());
  for (size_t other = 0; other < names.size(); ++other) {
    if (names[other] == names[static_cast<size_t>(rank)]) continue;
    std::vector<int>& list = carried[index_of_[other] % carried.size()];
    list.push_back(static_cast<int>(other));
    most_carried = std::max(most_carried, list.size());
  }
}

int HostPlaces::carrier(size_t on, int other) const {
  return members[on][index_of_[static_cast<size_t>(other)] % members[on].size()];
}

std::string HostPlaces::host_name(int of) const {
  const std::string& name = names[static_cast<size_t>(of)];
  return name.substr(0, name.find('/'));
}

}  // namespace fsdp2::comm
