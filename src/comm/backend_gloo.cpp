// The header is empty without this.
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif

#include "comm/backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <arpa/inet.h>
#include <cstdlib>
#include <memory>
#include <netdb.h>
#include <sstream>
#include <sys/socket.h>
#include <unistd.h>

namespace fsdp2::comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;

/// This host's address on the way to `host`; empty if it cannot be told. Sends nothing. The address
/// that the host's own name resolves to is often loopback, which peers cannot reach.
std::string local_address_towards(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "1", &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  for (const addrinfo* address = found; address; address = address->ai_next) {
    const int handle = socket(address->ai_family, address->ai_socktype, address->ai_protocol);
    if (handle < 0) continue;
    sockaddr_storage local = {};
    socklen_t length = sizeof local;
    const bool known = connect(handle, address->ai_addr, address->ai_addrlen) == 0 &&
                       getsockname(handle, reinterpret_cast<sockaddr*>(&local), &length) == 0;
    close(handle);
    char text[NI_MAXHOST];
    if (known && getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text, sizeof text,
                             nullptr, 0, NI_NUMERICHOST) == 0) {
      return text;
    }
  }
  return {};
}

void choose_devices(const std::string& master_addr, Gloo::Options& options) {
  if (const char* names = std::getenv("GLOO_SOCKET_IFNAME"); names && *names) {
    std::istringstream in(names);
    for (std::string name; std::getline(in, name, ',');) {
      if (!name.empty()) options.devices.push_back(Gloo::createDeviceForInterface(name));
    }
    options.threads = static_cast<int>(options.devices.size()) * 2;
    return;
  }
  const std::string address =
      master_addr.empty() ? std::string() : local_address_towards(master_addr);
  options.devices.push_back(address.empty() ? Gloo::createDefaultDevice()
                                            : Gloo::createDeviceForHostname(address));
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendOptions& options) {
  auto gloo = Gloo::Options::create(options.timeout);
  // A group of one meets nobody: it needs no interface but loopback.
  choose_devices(options.global_ranks.size() == 1 ? "127.0.0.1" : options.master_addr, *gloo);
  gloo->group_name = options.group_name;
  gloo->global_ranks_in_group.assign(options.global_ranks.begin(), options.global_ranks.end());
  return c10::make_intrusive<Gloo>(options.store, options.rank,
                                   static_cast<int>(options.global_ranks.size()), gloo);
}

}  // namespace fsdp2::comm
