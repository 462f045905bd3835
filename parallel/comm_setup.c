/* comm_setup.c - who shares a host with whom, and the memory that ranks of a host share.
 *
 * In: the launcher's store. Out: for every peer a connection: local peers' doorbells, control block and
 * registered memory mapped here; TCP to all others.
 * Ranks of a host pass descriptors of anonymous memory over Unix sockets, whose names exist only while the
 * sockets are open: whatever dies when, nothing stays behind. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"
#include "parallel/comm_internal.h"

enum { FDS_MAX = 3, ADDRESS_MAX = 256 };
static const double setup_limit_s = 600.0; /* where the options give none */

/* What a rank tells all others; in the store as three lines. */
typedef struct {
    char place[96]; /* equal on ranks that can share memory: host, boot, network namespace */
    char host[256];
    char address[ADDRESS_MAX];
} Card;

/* What a rank tells a local peer, with descriptors. */
typedef struct {
    int32_t rank, n_fds;
    int64_t bytes;
} Hello;

static double limit_s(const Comm *comm) {
    return comm->options.timeout_s > 0 ? comm->options.timeout_s : setup_limit_s;
}

/* ---- Unix sockets ---- */

static socklen_t unix_address(struct sockaddr_un *address, const Launch *launch, int generation, int rank) {
    struct {
        uint8_t secret[16];
        int32_t generation, rank;
    } text = {.generation = generation, .rank = rank};
    launch_secret(launch, text.secret);
    XXH128_hash_t hash = XXH3_128bits(&text, sizeof text);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    /* The leading zero byte: an abstract name, in no directory. */
    int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "trident-%016llx%016llx",
                     (unsigned long long)hash.high64, (unsigned long long)hash.low64);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int unix_listen(const Launch *launch, int generation) {
    struct sockaddr_un address;
    socklen_t bytes = unix_address(&address, launch, generation, launch_rank(launch));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, bytes) != 0 || listen(fd, 4096) != 0) {
        die(EXIT_LAUNCH, "cannot listen for the ranks of this host: %s", strerror(errno));
    }
    return fd;
}

static bool same_user(int fd) {
    struct ucred who;
    socklen_t bytes = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes) == 0 && who.uid == geteuid();
}

static int unix_connect(const Launch *launch, int generation, int rank) {
    struct sockaddr_un address;
    socklen_t bytes = unix_address(&address, launch, generation, rank);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), status = -1;
    if (fd >= 0) {
        do {
            status = connect(fd, (struct sockaddr *)&address, bytes);
        } while (status != 0 && errno == EINTR);
    }
    if (status != 0) {
        die(EXIT_LAUNCH,
            "rank %d cannot reach rank %d, which reports the same host %s: %s (ranks of one host must share "
            "its network namespace)",
            launch_rank(launch), rank, launch_host(launch), strerror(errno));
    }
    if (!same_user(fd)) die(EXIT_LAUNCH, "rank %d on this host belongs to another user", rank);
    return fd;
}

static void send_hello(const Comm *comm, int rank, int64_t bytes, const int *fds, int n_fds) {
    Hello hello = {.rank = comm->rank, .n_fds = n_fds, .bytes = bytes};
    struct iovec part = {&hello, sizeof hello};
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(FDS_MAX * sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.room,
                             .msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int))};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN((size_t)n_fds * sizeof(int));
    memcpy(CMSG_DATA(header), fds, (size_t)n_fds * sizeof(int));
    ssize_t n;
    do {
        n = sendmsg(comm->peers[rank].socket, &message, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t)sizeof hello) die(EXIT_PEER_LOST, "rank %d on this host is gone (%s)", rank, strerror(errno));
}

/* Reads a hello with n_fds descriptors. who: in messages. */
static Hello receive_hello(int fd, int *fds, int n_fds, double deadline_s, const char *who) {
    Hello hello;
    struct iovec part = {&hello, sizeof hello};
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(FDS_MAX * sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.room,
                             .msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int))};
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    ssize_t n;
    do {
        double left_s = deadline_s - clock_s();
        if (left_s <= 0) die(EXIT_HANG, "%s on this host did not pass its shared memory in time", who);
        n = poll(&ready, 1, (int)(left_s * 1000) + 1) > 0 ? recvmsg(fd, &message, MSG_CMSG_CLOEXEC) : -1;
    } while (n < 0 && (errno == EINTR || errno == EAGAIN || !ready.revents));
    if (n <= 0) die(EXIT_PEER_LOST, "%s on this host is gone", who);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    bool good = n == (ssize_t)sizeof hello && hello.n_fds == n_fds && header && header->cmsg_type == SCM_RIGHTS &&
                header->cmsg_len == CMSG_LEN((size_t)n_fds * sizeof(int));
    if (!good)
        die(EXIT_LAUNCH, "%s on this host is of another version of this program (or has no descriptors left)", who);
    memcpy(fds, CMSG_DATA(header), (size_t)n_fds * sizeof(int));
    return hello;
}

/* ---- the peers of this host ---- */

static void greet(Comm *comm, int rank) {
    const int fds[FDS_MAX] = {bells_fd(), bells_event_fd(), comm->control.fd};
    send_hello(comm, rank, 0, fds, FDS_MAX);
}

static void take_greeting(Comm *comm, int rank, const int fds[FDS_MAX]) {
    Peer *peer = &comm->peers[rank];
    peer->bells = device_memory_map(fds[0], sizeof *peer->bells);
    peer->event_fd = fds[1];
    peer->control_fd = fds[2];
    peer->control = device_memory_map(fds[2], sizeof *peer->control);
    close(fds[0]);
}

/* "rank 3 and 2 more" of the higher ranks that have not called, of which so many are missing. */
static void list_missing(const Comm *comm, bool local, int missing, char text[64]) {
    int rank = comm->rank + 1;
    while (comm->peers[rank].local != local || comm->peers[rank].socket >= 0 || comm->peers[rank].connection) rank++;
    if (missing > 1) snprintf(text, 64, "rank %d and %d more", rank, missing - 1);
    else snprintf(text, 64, "rank %d", rank);
}

/* Calls go to lower ranks: they are answered once the caller's greeting was read. */
static void meet_local(Comm *comm, const Launch *launch, int listener) {
    double deadline_s = clock_s() + limit_s(comm);
    int fds[FDS_MAX], missing = 0;
    char who[64];
    for (int rank = 0; rank < comm->size; rank++) {
        if (!comm->peers[rank].local || rank == comm->rank) continue;
        missing += rank > comm->rank;
        if (rank > comm->rank) continue;
        comm->peers[rank].socket = unix_connect(launch, comm->generation, rank);
        greet(comm, rank);
    }
    for (; missing > 0; missing--) {
        struct pollfd ready = {.fd = listener, .events = POLLIN};
        int fd = -1;
        while (fd < 0) {
            double left_s = deadline_s - clock_s();
            if (left_s <= 0) {
                list_missing(comm, true, missing, who);
                die(EXIT_HANG, "%s on this host did not open shared memory within %.0f s", who, limit_s(comm));
            }
            if (poll(&ready, 1, (int)(left_s * 1000) + 1) > 0) fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
            if (fd < 0 || same_user(fd)) continue;
            close(fd);
            fd = -1;
        }
        Hello hello = receive_hello(fd, fds, FDS_MAX, deadline_s, "a rank");
        REQUIRE(hello.rank > comm->rank && hello.rank < comm->size && comm->peers[hello.rank].local);
        comm->peers[hello.rank].socket = fd;
        take_greeting(comm, hello.rank, fds);
        greet(comm, hello.rank);
    }
    for (int rank = 0; rank < comm->rank; rank++) {
        if (!comm->peers[rank].local) continue;
        snprintf(who, sizeof who, "rank %d", rank);
        receive_hello(comm->peers[rank].socket, fds, FDS_MAX, deadline_s, who);
        take_greeting(comm, rank, fds);
    }
}

static void open_own_control(Comm *comm) {
    Peer *self = &comm->peers[comm->rank];
    comm->control = device_memory_create(sizeof(Control));
    comm->control_used = round_up((int64_t)sizeof(Control), 1 << 16);
    self->local = true;
    self->bells = bells_own();
    self->event_fd = bells_event_fd();
    self->control = comm->control.base;
    self->control_fd = comm->control.fd;
}

/* ---- the peers of other hosts ---- */

static void add_remote(Comm *comm, int rank, int fd) {
    REQUIRE(rank >= 0 && rank < comm->size && !comm->peers[rank].local && !comm->peers[rank].connection);
    comm->peers[rank].connection = net_add(comm->net, rank, fd);
}

static void meet_remote(Comm *comm, const Launch *launch, int listener, const Card *cards) {
    double deadline_s = clock_s() + limit_s(comm);
    int missing = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        if (comm->peers[rank].local) continue;
        missing += rank > comm->rank;
        if (rank > comm->rank) continue;
        int fd = launch_connect(launch, cards[rank].address, deadline_s - clock_s());
        if (fd < 0)
            die(EXIT_LAUNCH, "no connection to rank %d on host %s at %s", rank, cards[rank].host, cards[rank].address);
        add_remote(comm, rank, fd);
    }
    for (; missing > 0; missing--) {
        int rank = -1, fd = launch_accept(launch, listener, &rank, deadline_s - clock_s());
        if (fd < 0) {
            char who[64];
            list_missing(comm, false, missing, who);
            die(EXIT_HANG, "%s on other hosts did not connect within %.0f s", who, limit_s(comm));
        }
        add_remote(comm, rank, fd);
    }
}

/* ---- who is where ---- */

static void describe_place(char place[96], const Launch *launch) {
    char boot[40] = "";
    struct stat network = {0};
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file) {
        if (!fgets(boot, sizeof boot, file)) boot[0] = 0;
        fclose(file);
    }
    boot[strcspn(boot, "\n")] = 0;
    if (stat("/proc/self/ns/net", &network) != 0) network.st_ino = 0;
    unsigned long long host = XXH3_64bits(launch_host(launch), strlen(launch_host(launch)));
    snprintf(place, 96, "%016llx %s %llu", host, boot, (unsigned long long)network.st_ino);
}

static Card *exchange_cards(Comm *comm, Launch *launch, int *listener) {
    char key[32];
    Card mine = {.address = ""};
    char text[sizeof mine + 3];
    Card *cards = xcalloc((uint64_t)comm->size, sizeof *cards);
    snprintf(key, sizeof key, "comm.%d.card", comm->generation);
    snprintf(mine.host, sizeof mine.host, "%s", launch_host(launch));
    describe_place(mine.place, launch);
    *listener = launch_listen(launch, mine.address);
    int used = snprintf(text, sizeof text, "%s\n%s\n%s", mine.place, mine.host, mine.address);
    launch_put(launch, key, text, (size_t)used + 1);
    launch_fence(launch, key);
    for (int rank = 0; rank < comm->size; rank++) {
        size_t bytes;
        char *card = launch_get(launch, rank, key, &bytes);
        bool good = bytes > 0 && card[bytes - 1] == 0 &&
                    sscanf(card, "%95[^\n]\n%255[^\n]\n%255[^\n]", cards[rank].place, cards[rank].host,
                           cards[rank].address) == 3;
        if (!good) die(EXIT_LAUNCH, "rank %d is of another version of this program", rank);
        free(card);
        comm->hosts[rank] = xstrdup(cards[rank].host);
        bool same = strcmp(cards[rank].place, mine.place) == 0;
        comm->peers[rank].local = rank == comm->rank || (same && !comm->options.force_tcp);
        if (!comm->peers[rank].local && !comm->net) comm->net = net_create(comm);
    }
    return cards;
}

/* A local peer that is gone shows at its socket. Where a watchdog runs it is faster, and names the cause. */
static void check_peers(void *context) {
    const Comm *comm = context;
    for (int rank = 0; rank < comm->size; rank++) {
        const Peer *peer = &comm->peers[rank];
        if (peer->socket < 0) continue;
        struct pollfd state = {.fd = peer->socket, .events = POLLRDHUP};
        if (poll(&state, 1, 0) <= 0 || atomic_load(&peer->control->ended)) continue;
        die(EXIT_PEER_LOST, "rank %d on host %s was lost", rank, comm->hosts[rank]);
    }
}

/* Ranks that have a core each wait awake for a moment; ranks that share cores never do: they yield, then sleep. */
static void choose_wait(Comm *comm, LaunchCores cores) {
    int local = 0;
    for (int rank = 0; rank < comm->size; rank++) local += comm->peers[rank].local;
    if (local > 1) progress_set_check(check_peers, comm);
    if (cores.sharers <= cores.allowed) {
        progress_set_spin(5e-6);
    } else {
        progress_set_yields((int)(2 * ceil_div(cores.sharers, cores.allowed))); /* each rank of a core gets it twice */
    }
}

void comm_connect(Comm *comm, Launch *launch) {
    comm->peers = xcalloc((uint64_t)comm->size, sizeof *comm->peers);
    comm->hosts = xcalloc((uint64_t)comm->size, sizeof *comm->hosts);
    for (int rank = 0; rank < comm->size; rank++) comm->peers[rank].socket = comm->peers[rank].event_fd = -1;
    open_own_control(comm);
    if (comm->size == 1) {
        comm->hosts[0] = xstrdup(launch_host(launch));
        return;
    }
    int tcp_listener, unix_listener = unix_listen(launch, comm->generation);
    Card *cards = exchange_cards(comm, launch, &tcp_listener);
    meet_local(comm, launch, unix_listener);
    meet_remote(comm, launch, tcp_listener, cards);
    close(unix_listener);
    launch_close_listener(launch, tcp_listener);
    free(cards);
    choose_wait(comm, launch_cores(launch));
}

void comm_disconnect(Comm *comm) {
    progress_set_check(NULL, NULL);
    progress_set_spin(0);
    progress_set_yields(0);
    atomic_store(&comm->peers[comm->rank].control->ended, 1);
    if (comm->net) net_free(comm->net);
    for (int rank = 0; rank < comm->size; rank++) {
        Peer *peer = &comm->peers[rank];
        free(comm->hosts[rank]);
        if (!peer->local || rank == comm->rank) continue;
        munmap(peer->bells, sizeof *peer->bells);
        munmap(peer->control, sizeof *peer->control);
        if (peer->memory) munmap(peer->memory, (size_t)peer->memory_bytes);
        close(peer->socket);
        close(peer->event_fd);
        close(peer->control_fd);
    }
    device_memory_destroy(&comm->control);
    free(comm->hosts);
    free(comm->peers);
}

/* ---- registered memory ---- */

void comm_share_memory(Comm *comm, const DeviceMemory *memory) {
    Peer *self = &comm->peers[comm->rank];
    double deadline_s = clock_s() + limit_s(comm);
    REQUIRE(!self->memory);
    self->memory = memory->base;
    self->memory_bytes = (int64_t)memory->bytes;
    for (int rank = 0; rank < comm->size; rank++) {
        if (comm->peers[rank].local && rank != comm->rank) send_hello(comm, rank, self->memory_bytes, &memory->fd, 1);
    }
    for (int rank = 0; rank < comm->size; rank++) {
        Peer *peer = &comm->peers[rank];
        if (!peer->local || rank == comm->rank) continue;
        char who[64];
        int fd;
        snprintf(who, sizeof who, "rank %d", rank);
        peer->memory_bytes = receive_hello(peer->socket, &fd, 1, deadline_s, who).bytes;
        peer->memory = device_memory_map(fd, (size_t)peer->memory_bytes);
        close(fd);
    }
}

int64_t comm_place(const Comm *comm, const void *buffer, int64_t bytes) {
    const Peer *self = &comm->peers[comm->rank];
    uintptr_t base = (uintptr_t)self->memory, at = (uintptr_t)buffer;
    if (!self->memory || at < base || at - base > (uintptr_t)self->memory_bytes) return -1;
    int64_t offset = (int64_t)(at - base);
    return bytes <= self->memory_bytes - offset ? offset : -1;
}

/* ---- blocks ---- */

/* base 0: only the size is wanted. */
static int64_t lay_out(Block *block, uintptr_t base, int n) {
    uintptr_t at = base, members = (uintptr_t)n, pairs = members * members;
    block->base = (char *)base;
    block->head = (BlockHead *)at;
    at += sizeof(BlockHead);
    block->members = (Member *)at;
    at += members * sizeof(Member);
    for (int lane = 0; lane < 2; lane++) {
        block->pairs[lane] = (Pair *)at;
        at += pairs * sizeof(Pair);
    }
    at = (at + 4095) / 4096 * 4096;
    block->windows = (char *)at;
    at += 2 * members * WINDOW_BYTES;
    for (int lane = 0; lane < 2; lane++) {
        block->pair_windows[lane] = (char *)at;
        at += pairs * PAIR_WINDOW_BYTES;
    }
    block->bytes = round_up((int64_t)(at - base), 1 << 16);
    return block->bytes;
}

/* The first local member appends a block to its control memory; only pages that are used take memory. */
static BlockEntry *make_block(Group *group) {
    Comm *comm = group->comm;
    Control *control = comm->control.base;
    Block layout;
    if (comm->n_blocks == BLOCKS_MAX) {
        die(EXIT_LAUNCH, "group %s is one more than the %d groups that rank %d can be first in", group->name,
            BLOCKS_MAX, comm->rank);
    }
    BlockEntry *entry = &control->blocks[comm->n_blocks++];
    entry->offset = comm->control_used;
    entry->bytes = lay_out(&layout, 0, group->n_local);
    comm->control_used += entry->bytes;
    if (ftruncate(comm->control.fd, (off_t)comm->control_used) != 0) {
        die(EXIT_LAUNCH, "cannot grow shared memory to %lld bytes: %s", (long long)comm->control_used, strerror(errno));
    }
    atomic_store(&entry->key, group->key);
    return entry;
}

static const BlockEntry *find_block(const Control *control, uint64_t key) {
    for (int i = 0; i < BLOCKS_MAX; i++) {
        if (atomic_load(&control->blocks[i].key) == key) return &control->blocks[i];
    }
    return NULL;
}

/* The first local member may come later; groups are made once, so short naps will do. */
static const BlockEntry *wait_for_block(const Group *group, int first) {
    static const double nap_s = 0.0005, check_s = 0.5;
    Comm *comm = group->comm;
    double start_s = clock_s(), next_check_s = start_s + check_s;
    const BlockEntry *entry;
    while (!(entry = find_block(comm->peers[first].control, group->key))) {
        sleep_s(nap_s);
        double now = clock_s();
        if (now - start_s > limit_s(comm)) {
            die(EXIT_HANG, "rank %d waited %.1f s to make group %s of %d ranks: rank %d has not come", comm->rank,
                now - start_s, group->name, group->size, first);
        }
        if (now < next_check_s) continue;
        check_peers(comm);
        next_check_s = now + check_s;
    }
    return entry;
}

void comm_open_block(Group *group) {
    Comm *comm = group->comm;
    int first = -1;
    group->local_index = xcalloc((uint64_t)group->size, sizeof *group->local_index);
    for (int i = 0; i < group->size; i++) {
        bool local = comm->peers[group->ranks[i]].local;
        if (local && first < 0) first = group->ranks[i];
        group->local_index[i] = local ? group->n_local++ : -1;
    }
    group->shared = group->n_local == group->size;
    if (group->n_local < 2) return;
    const BlockEntry *entry = first == comm->rank ? make_block(group) : wait_for_block(group, first);
    char *base = mmap(NULL, (size_t)entry->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, comm->peers[first].control_fd,
                      (off_t)entry->offset);
    if (base == MAP_FAILED) {
        die(EXIT_LAUNCH, "cannot map %lld bytes of shared memory: %s", (long long)entry->bytes, strerror(errno));
    }
    lay_out(&group->block, (uintptr_t)base, group->n_local);
    group->block.members[group->local_index[group->rank]].rank = comm->rank;
}
