#include "launch/port.h"

#include <cerrno>
#include <netinet/in.h>
#include <sys/socket.h>
#include <system_error>
#include <unistd.h>

namespace fsdp2::launch {
namespace {

/// A listening socket on `port` of all addresses (0: any port), or -1 with errno.
int listen_on(int port) {
  const int one = 1, zero = 0;
  int descriptor = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool v6 = descriptor >= 0;
  if (!v6) descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return -1;
  // As c10d's store does: a port whose last connections only linger is not in use.
  setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  int failed;
  if (v6) {
    setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof(zero));
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_any;
    address.sin6_port = htons(static_cast<uint16_t>(port));
    failed = bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  } else {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    address.sin_port = htons(static_cast<uint16_t>(port));
    failed = bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  }
  if (failed == 0) failed = listen(descriptor, 1);
  if (failed == 0) return descriptor;
  const int error = errno;
  close(descriptor);
  errno = error;
  return -1;
}

}  // namespace

int free_port() {
  const int descriptor = listen_on(0);
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "no free TCP port");
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &size);
  close(descriptor);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

bool port_is_free(int port) {
  const int descriptor = listen_on(port);
  if (descriptor >= 0) close(descriptor);
  return descriptor >= 0 || (errno != EADDRINUSE && errno != EACCES);
}

}  // namespace fsdp2::launch
