/* launch_net.c - TCP between ranks: listeners that only take peers of the job, and connecting to them.
 *
 * Both sides show that they know the job's secret: a keyed hash (XXH3, 128 bits) over the secret, both
 * ranks and a fresh random number from each side:
 *     caller -> listener   magic, own rank, rank it wants, nonce
 *     listener -> caller   nonce
 *     caller -> listener   hash "caller"
 *     listener -> caller   hash "listener"
 * This keeps strays and strangers out (port scanners, another job's ranks, an old run's). It is no
 * cryptography: who can read the network's traffic could work against it, and nothing is encrypted.
 * A listener serves many handshakes at once, each with a limit of its own, so that a connection that
 * says nothing holds up nobody. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"
#include "parallel/launch_internal.h"

enum { NONCE_BYTES = 16, PROOF_BYTES = 16, STRAYS_LOGGED_MAX = 3 };
static const double handshake_limit_s = 5.0;

typedef struct {
    char magic[8];
    int32_t from_rank, to_rank;
    uint8_t nonce[NONCE_BYTES];
} Hello;
_Static_assert(sizeof(Hello) == 32, "size on the wire");
static const char hello_magic[8] = "TRIDENT1";

typedef struct {
    int fd;
    double deadline;
    Hello hello;
    uint8_t nonce[NONCE_BYTES], proof[PROOF_BYTES];
    size_t got; /* bytes of hello, then of proof */
    char from[64];
} Visitor;

/* A listener and the handshakes that are under way at it. */
struct Door {
    Door *next;
    int listener, epoll;
    Visitor **visitors;
    int n_visitors, n_strays;
};

/* ---- bytes ---- */

/* poll for one descriptor until the deadline: false when it has passed. */
static bool wait_for(int fd, short events, double deadline) {
    for (;;) {
        double left_s = deadline - clock_s();
        if (left_s <= 0) return false;
        struct pollfd ready = {.fd = fd, .events = events};
        int n = poll(&ready, 1, left_s < 1e6 ? (int)(left_s * 1000) + 1 : 1000000000);
        if (n > 0) return true;
        if (n < 0 && errno != EINTR) return true; /* the next call on the descriptor reports it */
    }
}

int net_read(int fd, void *to, size_t bytes, double deadline) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = recv(fd, (char *)to + done, bytes - done, MSG_DONTWAIT);
        if (n > 0) {
            done += (size_t)n;
        } else if (n == 0) {
            errno = 0;
            return -1;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (!wait_for(fd, POLLIN, deadline)) {
                errno = ETIMEDOUT;
                return -1;
            }
        } else if (errno != EINTR) {
            return -1;
        }
    }
    return 0;
}

int net_write(int fd, const void *from, size_t bytes, double deadline) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = send(fd, (const char *)from + done, bytes - done, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) {
            done += (size_t)n;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!wait_for(fd, POLLOUT, deadline)) {
                errno = ETIMEDOUT;
                return -1;
            }
        } else if (n < 0 && errno != EINTR) {
            return -1;
        }
    }
    return 0;
}

void net_random(void *to, size_t bytes) {
    if (getrandom(to, bytes, 0) != (ssize_t)bytes) die(EXIT_LAUNCH, "getrandom: %s", strerror(errno));
}

static void set_nodelay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* ---- the proof ---- */

static void make_proof(uint8_t proof[PROOF_BYTES], const Launch *launch, const char *side, const Hello *hello,
                       const uint8_t listener_nonce[NONCE_BYTES]) {
    struct {
        uint8_t secret[16];
        char side[16];
        Hello hello;
        uint8_t nonce[NONCE_BYTES], secret_again[16];
    } text;
    memset(&text, 0, sizeof text);
    memcpy(text.secret, launch->secret, sizeof text.secret);
    snprintf(text.side, sizeof text.side, "%s", side);
    text.hello = *hello;
    memcpy(text.nonce, listener_nonce, NONCE_BYTES);
    memcpy(text.secret_again, launch->secret, sizeof text.secret_again);
    XXH128_canonical_t hash;
    XXH128_canonicalFromHash(&hash, XXH3_128bits(&text, sizeof text));
    memcpy(proof, hash.digest, PROOF_BYTES);
}

/* ---- listening ---- */

/* Binds and listens; -1 with errno. */
static int listen_at(const struct sockaddr *address, socklen_t bytes) {
    int on = 1, off = 0;
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->sa_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, address, bytes) == 0 && listen(fd, 4096) == 0) return fd;
    int kept = errno;
    close(fd);
    errno = kept;
    return -1;
}

static int listen_on_port(bool loopback_only, int port) {
    if (!loopback_only) {
        struct sockaddr_in6 both = {
            .sin6_family = AF_INET6, .sin6_addr = in6addr_any, .sin6_port = htons((uint16_t)port)};
        int fd = listen_at((struct sockaddr *)&both, sizeof both);
        if (fd >= 0 || errno == EADDRINUSE || errno == EACCES) return fd;
    }
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    v4.sin_addr.s_addr = htonl(loopback_only ? INADDR_LOOPBACK : INADDR_ANY);
    return listen_at((struct sockaddr *)&v4, sizeof v4);
}

static void door_free(Door *door) {
    for (int i = 0; i < door->n_visitors; i++) {
        close(door->visitors[i]->fd);
        free(door->visitors[i]);
    }
    close(door->epoll);
    free(door->visitors);
    free(door);
}

static void door_forget(Launch *launch, int listener) {
    for (Door **at = &launch->doors; *at; at = &(*at)->next) {
        if ((*at)->listener != listener) continue;
        Door *door = *at;
        *at = door->next;
        door_free(door);
        return;
    }
}

int net_listen(Launch *launch, int port, double bind_patience_s) {
    double deadline = clock_s() + bind_patience_s;
    int fd = listen_on_port(launch->loopback_only, port);
    while (fd < 0 && errno == EADDRINUSE && clock_s() < deadline) {
        sleep_s(0.1);
        fd = listen_on_port(launch->loopback_only, port);
    }
    if (fd < 0 && errno == EADDRINUSE) {
        die(EXIT_LAUNCH,
            "rank %d cannot listen on port %d of host %s: it is in use (another job, or a second process with "
            "RANK=%d?); "
            "set another MASTER_PORT",
            launch->rank, port, launch->host, launch->rank);
    }
    if (fd < 0) die(EXIT_LAUNCH, "rank %d cannot listen on port %d: %s", launch->rank, port, strerror(errno));
    door_forget(launch, fd); /* an earlier listener of that number was closed by its owner */
    Door *door = xcalloc(1, sizeof *door);
    door->listener = fd;
    door->epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (door->epoll < 0 || epoll_ctl(door->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        die(EXIT_LAUNCH, "epoll: %s", strerror(errno));
    }
    door->next = launch->doors;
    launch->doors = door;
    return fd;
}

void net_doors_free(Launch *launch) {
    while (launch->doors) door_forget(launch, launch->doors->listener);
}

void launch_close_listener(Launch *launch, int listener) {
    door_forget(launch, listener);
    close(listener);
}

static int port_of(int fd) {
    struct sockaddr_storage own;
    socklen_t bytes = sizeof own;
    if (getsockname(fd, (struct sockaddr *)&own, &bytes) != 0) die(EXIT_LAUNCH, "getsockname: %s", strerror(errno));
    return ntohs(own.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&own)->sin6_port
                                           : ((struct sockaddr_in *)&own)->sin_port);
}

/* Adds "host:port" to a comma-separated list, where it still fits. */
static void address_add(char *list, size_t capacity, const char *host, int port) {
    char one[LAUNCH_HOST_MAX + 16];
    snprintf(one, sizeof one, "%s%s%s%s:%d", list[0] ? "," : "", strchr(host, ':') ? "[" : "", host,
             strchr(host, ':') ? "]" : "", port);
    if (strlen(list) + strlen(one) < capacity) strcat(list, one);
}

/* The addresses of this host's interfaces, IPv4 first; TRIDENT_INTERFACE keeps those of one only. */
static void add_interfaces(char *list, size_t capacity, int port) {
    const char *wanted = getenv("TRIDENT_INTERFACE");
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0) return;
    for (int pass = 0; pass < 2; pass++) {
        int family = pass == 0 ? AF_INET : AF_INET6;
        for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
            if (!i->ifa_addr || i->ifa_addr->sa_family != family || !(i->ifa_flags & IFF_UP)) continue;
            if (wanted ? strcmp(wanted, i->ifa_name) != 0 : (i->ifa_flags & IFF_LOOPBACK) != 0) continue;
            if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)i->ifa_addr)->sin6_addr)) continue;
            char host[64];
            socklen_t bytes = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
            if (getnameinfo(i->ifa_addr, bytes, host, sizeof host, NULL, 0, NI_NUMERICHOST) == 0) {
                address_add(list, capacity, host, port);
            }
        }
    }
    freeifaddrs(all);
    if (wanted && !list[0])
        die(EXIT_LAUNCH, "TRIDENT_INTERFACE=%s: no such interface that is up and has an address", wanted);
}

int launch_listen(const Launch *launch, char address[256]) {
    int fd = net_listen((Launch *)launch, 0, 0.0);
    int port = port_of(fd);
    char list[LAUNCH_ADDRESS_MAX - 16] = "";
    if (!launch->loopback_only) {
        if (launch->own_address[0] && !getenv("TRIDENT_INTERFACE")) {
            address_add(list, sizeof list, launch->own_address, port);
        }
        if (!list[0]) add_interfaces(list, sizeof list, port);
    }
    if (!list[0]) address_add(list, sizeof list, "127.0.0.1", port);
    snprintf(address, LAUNCH_ADDRESS_MAX, "%s#%d", list, launch->rank);
    return fd;
}

/* ---- accepting ---- */

static Door *door_of(const Launch *launch, int listener) {
    Door *door = launch->doors;
    while (door && door->listener != listener) door = door->next;
    REQUIRE(door);
    return door;
}

int net_door_fd(const Launch *launch, int listener) { return door_of(launch, listener)->epoll; }

static void door_remove(Door *door, int i) {
    free(door->visitors[i]);
    door->visitors[i] = door->visitors[--door->n_visitors];
}

static void door_drop(Door *door, int i, const char *reason) {
    const Visitor *visitor = door->visitors[i];
    if (++door->n_strays <= STRAYS_LOGGED_MAX) {
        log_warn(LOG_LAUNCH, "dropped a connection from %s: %s%s", visitor->from, reason,
                 door->n_strays == STRAYS_LOGGED_MAX ? " (further ones are dropped without a word)" : "");
    }
    close(visitor->fd);
    door_remove(door, i);
}

static void door_admit(Door *door) {
    for (;;) {
        struct sockaddr_storage peer;
        socklen_t bytes = sizeof peer;
        int fd = accept4(door->listener, (struct sockaddr *)&peer, &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0) return; /* none left; or out of descriptors: the caller's deadline ends the wait */
        Visitor *visitor = xcalloc(1, sizeof *visitor);
        visitor->fd = fd;
        visitor->deadline = clock_s() + handshake_limit_s;
        if (getnameinfo((struct sockaddr *)&peer, bytes, visitor->from, sizeof visitor->from, NULL, 0,
                        NI_NUMERICHOST)) {
            snprintf(visitor->from, sizeof visitor->from, "an unknown address");
        }
        set_nodelay(fd);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = visitor};
        epoll_ctl(door->epoll, EPOLL_CTL_ADD, fd, &event);
        door->visitors = xrealloc(door->visitors, (uint64_t)(door->n_visitors + 1) * sizeof *door->visitors);
        door->visitors[door->n_visitors++] = visitor;
    }
}

/* Reads what the visitor sent. 1: a peer, its handshake is complete; 0: not yet; -1 with a reason. */
static int visitor_step(const Launch *launch, Visitor *visitor, const char **reason) {
    size_t whole = sizeof visitor->hello + PROOF_BYTES;
    while (visitor->got < whole) {
        bool greeting = visitor->got < sizeof visitor->hello;
        uint8_t *to = greeting ? (uint8_t *)&visitor->hello + visitor->got
                               : visitor->proof + (visitor->got - sizeof visitor->hello);
        size_t room = (greeting ? sizeof visitor->hello : whole) - visitor->got;
        ssize_t n = recv(visitor->fd, to, room, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
        *reason = "it closed before it had shown that it belongs to this job";
        if (n <= 0) return -1;
        visitor->got += (size_t)n;
        if (visitor->got != sizeof visitor->hello) continue;
        *reason = "it speaks another protocol";
        if (memcmp(visitor->hello.magic, hello_magic, sizeof hello_magic) != 0) return -1;
        *reason = "it looks for another rank";
        if (visitor->hello.to_rank != launch->rank || visitor->hello.from_rank < 0) return -1;
        net_random(visitor->nonce, sizeof visitor->nonce);
        *reason = "it closed in the middle of the handshake";
        if (net_write(visitor->fd, visitor->nonce, sizeof visitor->nonce, 0.0) != 0) return -1;
    }
    uint8_t expected[PROOF_BYTES], answer[PROOF_BYTES];
    make_proof(expected, launch, "caller", &visitor->hello, visitor->nonce);
    *reason = "it does not know this job's secret";
    if (memcmp(expected, visitor->proof, PROOF_BYTES) != 0) return -1;
    make_proof(answer, launch, "listener", &visitor->hello, visitor->nonce);
    *reason = "it closed in the middle of the handshake";
    return net_write(visitor->fd, answer, sizeof answer, 0.0) == 0 ? 1 : -1;
}

/* All handshakes one step further; the descriptor of one that is complete, or -1. */
static int door_step(const Launch *launch, Door *door, int *peer_rank) {
    door_admit(door);
    for (int i = door->n_visitors - 1; i >= 0; i--) {
        Visitor *visitor = door->visitors[i];
        const char *reason = "it said nothing";
        int state = visitor_step(launch, visitor, &reason);
        if (state < 0) {
            door_drop(door, i, reason);
        } else if (state > 0) {
            int fd = visitor->fd;
            *peer_rank = visitor->hello.from_rank;
            epoll_ctl(door->epoll, EPOLL_CTL_DEL, fd, NULL);
            fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
            door_remove(door, i);
            return fd;
        } else if (clock_s() > visitor->deadline) {
            door_drop(door, i, "it said nothing");
        }
    }
    return -1;
}

int launch_accept(const Launch *launch, int listener, int *peer_rank, double timeout_s) {
    Door *door = door_of(launch, listener);
    double deadline = clock_s() + timeout_s;
    for (;;) {
        int fd = door_step(launch, door, peer_rank);
        if (fd >= 0) return fd;
        double now = clock_s();
        if (now >= deadline) return -1;
        /* Short waits only where a handshake's own limit must be watched. */
        double until = door->n_visitors > 0 && now + 0.5 < deadline ? now + 0.5 : deadline;
        wait_for(door->epoll, POLLIN, until);
    }
}

/* ---- connecting ---- */

static int connect_address(const struct addrinfo *address, double deadline) {
    int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    if (connect(fd, address->ai_addr, address->ai_addrlen) == 0) return fd;
    int status = errno;
    if (status == EINPROGRESS) {
        socklen_t bytes = sizeof status;
        status = ETIMEDOUT;
        if (wait_for(fd, POLLOUT, deadline)) getsockopt(fd, SOL_SOCKET, SO_ERROR, &status, &bytes);
    }
    if (status == 0) return fd;
    close(fd);
    errno = status;
    return -1;
}

/* The caller's half of the handshake. 0, or -1 with a reason. */
static int call(const Launch *launch, int fd, int to_rank, double deadline, char reason[128]) {
    Hello hello = {.from_rank = launch->rank, .to_rank = to_rank};
    uint8_t nonce[NONCE_BYTES], proof[PROOF_BYTES], answer[PROOF_BYTES];
    memcpy(hello.magic, hello_magic, sizeof hello_magic);
    net_random(hello.nonce, sizeof hello.nonce);
    snprintf(reason, 128, "the program there does not answer as rank %d of this job", to_rank);
    if (net_write(fd, &hello, sizeof hello, deadline) != 0) return -1;
    if (net_read(fd, nonce, sizeof nonce, deadline) != 0) return -1;
    make_proof(proof, launch, "caller", &hello, nonce);
    snprintf(reason, 128, "the program there is of another job (it does not know this job's secret)");
    if (net_write(fd, proof, sizeof proof, deadline) != 0) return -1;
    if (net_read(fd, answer, sizeof answer, deadline) != 0) return -1;
    make_proof(proof, launch, "listener", &hello, nonce);
    return memcmp(proof, answer, sizeof answer) == 0 ? 0 : -1;
}

int net_connect_once(const Launch *launch, const char *host, const char *port, int to_rank, double deadline,
                     char reason[128]) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    int status = getaddrinfo(host, port, &hints, &list);
    if (status != 0) {
        snprintf(reason, 128, "name not resolved: %s", gai_strerror(status));
        return -1;
    }
    int fd = -1;
    for (const struct addrinfo *address = list; address && fd < 0; address = address->ai_next) {
        fd = connect_address(address, deadline);
        if (fd < 0) {
            snprintf(reason, 128, "%s", strerror(errno));
            continue;
        }
        set_nodelay(fd);
        if (call(launch, fd, to_rank, deadline, reason) != 0) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(list);
    if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    return fd;
}

/* Splits the next "host:port" off a list; false at its end. */
static bool next_address(const char **list, char host[LAUNCH_HOST_MAX], char port[8]) {
    if (!**list) return false;
    char one[LAUNCH_HOST_MAX + 16];
    size_t length = strcspn(*list, ",");
    REQUIRE(length < sizeof one);
    memcpy(one, *list, length);
    one[length] = 0;
    *list += length + ((*list)[length] == ',');
    char *colon = strrchr(one, ':');
    REQUIRE(colon);
    *colon = 0;
    snprintf(port, 8, "%s", colon + 1);
    bool bracketed = one[0] == '[';
    snprintf(host, LAUNCH_HOST_MAX, "%.*s", (int)(strlen(one) - (bracketed ? 2 : 0)), one + bracketed);
    return true;
}

int net_connect(const Launch *launch, const char *address, double timeout_s, char reason[128]) {
    static const double per_address_s = 3.0, pause_s = 0.02;
    char list[LAUNCH_ADDRESS_MAX], host[LAUNCH_HOST_MAX], port[8];
    snprintf(list, sizeof list, "%s", address);
    char *mark = strrchr(list, '#');
    if (!mark) die(EXIT_LAUNCH, "\"%s\" is no address of a rank (host:port#rank)", address);
    *mark = 0;
    int to_rank = atoi(mark + 1);
    bool only_one = !strchr(list, ',');
    double deadline = clock_s() + timeout_s;
    snprintf(reason, 128, "no address");
    for (;;) {
        for (const char *rest = list; next_address(&rest, host, port);) {
            /* The peer answers a handshake when it comes to accept, which may be late: with one address
             * only there is nothing better to do than to wait for it. */
            double until = only_one ? deadline : clock_s() + per_address_s;
            int fd = net_connect_once(launch, host, port, to_rank, until < deadline ? until : deadline, reason);
            if (fd >= 0) return fd;
        }
        if (clock_s() + pause_s >= deadline) return -1;
        sleep_s(pause_s);
    }
}

int launch_connect(const Launch *launch, const char *address, double timeout_s) {
    char reason[128];
    int fd = net_connect(launch, address, timeout_s, reason);
    if (fd < 0) log_warn(LOG_LAUNCH, "no connection to %s within %.1f s: %s", address, timeout_s, reason);
    return fd;
}
