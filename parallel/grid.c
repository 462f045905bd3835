/* grid.c - rank arithmetic, placement of the grid on hosts, and its picture.
 *
 * In: sizes and order of the dimensions, and the host of every rank. Out: which rank sits at which grid
 * position. Nothing is assumed about how the launcher spread the ranks over the hosts.
 * Invariants: position <-> coordinates and position <-> rank are bijections; unless it was allowed,
 * no tensor group crosses hosts. */
#include "parallel/grid.h"

#include <stdlib.h>
#include <string.h>

static const char *const dim_names[DIM_COUNT] = {
    [DIM_TENSOR] = "tensor", [DIM_PIPELINE] = "pipeline", [DIM_DATA] = "data"};
enum { PICTURE_HOSTS_MAX = 64 };

const char *dim_name(Dim dim) { return dim_names[dim]; }

/* ---- arithmetic ---- */

int grid_parse_order(Dim order[DIM_COUNT], const char *order_text, Error *err) {
    static const char usage[] = "write the three names tensor, pipeline, data, the fastest-varying first";
    unsigned seen = 0;
    int n = 0;
    for (const char *at = order_text + strspn(order_text, ", \t"); *at;) {
        size_t length = strcspn(at, ", \t");
        int dim = 0;
        while (dim < DIM_COUNT && (strlen(dim_names[dim]) != length || strncmp(dim_names[dim], at, length) != 0)) dim++;
        if (dim == DIM_COUNT) {
            return error_set(err, EXIT_CONFIG, "order = %s: \"%.*s\" is no dimension; %s", order_text, (int)length, at,
                             usage);
        }
        if (seen & DIM_BIT(dim)) {
            return error_set(err, EXIT_CONFIG, "order = %s: %s is named twice; %s", order_text, dim_names[dim], usage);
        }
        seen |= DIM_BIT(dim);
        order[n++] = (Dim)dim;
        at += length;
        at += strspn(at, ", \t");
    }
    for (int dim = 0; dim < DIM_COUNT; dim++) {
        if (seen & DIM_BIT(dim)) continue;
        return error_set(err, EXIT_CONFIG, "order = %s: %s is missing; %s", order_text, dim_names[dim], usage);
    }
    return 0;
}

int grid_position(const Grid *grid, const int index[DIM_COUNT]) {
    int position = 0;
    for (int i = DIM_COUNT - 1; i >= 0; i--) position = position * grid->size[grid->order[i]] + index[grid->order[i]];
    return position;
}

void grid_coordinates(const Grid *grid, int position, int index[DIM_COUNT]) {
    for (int i = 0; i < DIM_COUNT; i++) {
        Dim dim = grid->order[i];
        index[dim] = position % grid->size[dim];
        position /= grid->size[dim];
    }
}

int grid_rank_at(const Grid *grid, const int index[DIM_COUNT]) { return grid->rank_at[grid_position(grid, index)]; }

/* Ranks along the dimensions in mask, through the coordinates `at`. */
static int group_through(const Grid *grid, const int at[DIM_COUNT], unsigned mask, int *ranks, int *mine) {
    int index[DIM_COUNT], n = 1;
    for (int dim = 0; dim < DIM_COUNT; dim++) n *= mask & DIM_BIT(dim) ? grid->size[dim] : 1;
    for (int i = 0; i < n; i++) {
        int rest = i;
        bool is_mine = true;
        for (int o = 0; o < DIM_COUNT; o++) {
            Dim dim = grid->order[o];
            bool varies = (mask & DIM_BIT(dim)) != 0;
            index[dim] = varies ? rest % grid->size[dim] : at[dim];
            if (varies) rest /= grid->size[dim];
            is_mine = is_mine && index[dim] == at[dim];
        }
        ranks[i] = grid_rank_at(grid, index);
        if (is_mine) *mine = i;
    }
    return n;
}

int grid_group(const Grid *grid, unsigned mask, int *ranks, int *mine) {
    return group_through(grid, grid->index, mask, ranks, mine);
}

/* ---- hosts ---- */

/* The ranks, host by host: hosts in the order of their first rank, ranks of a host ascending. */
typedef struct {
    int hosts;
    int *host_of; /* (world) number of a rank's host */
    int *first;   /* (hosts + 1) where a host's ranks begin in `ranks` */
    int *ranks;   /* (world) */
} HostMap;

typedef struct {
    const char *name;
    int rank;
} NamedRank;

static int by_name_then_rank(const void *a, const void *b) {
    const NamedRank *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

static HostMap host_map(const Seat *seats, int world) {
    HostMap map = {.host_of = xcalloc((uint64_t)world, sizeof(int)),
                   .first = xcalloc((uint64_t)world + 1, sizeof(int)),
                   .ranks = xcalloc((uint64_t)world, sizeof(int))};
    NamedRank *sorted = xcalloc((uint64_t)world, sizeof *sorted);
    int *leader = xcalloc((uint64_t)world, sizeof *leader); /* lowest rank on the same host */
    int *number = xcalloc((uint64_t)world, sizeof *number); /* of the host that a leader leads */
    for (int r = 0; r < world; r++) sorted[r] = (NamedRank){seats[r].host, r};
    qsort(sorted, (size_t)world, sizeof *sorted, by_name_then_rank);
    for (int i = 0; i < world; i++) {
        bool same = i > 0 && strcmp(sorted[i].name, sorted[i - 1].name) == 0;
        leader[sorted[i].rank] = same ? leader[sorted[i - 1].rank] : sorted[i].rank;
    }
    for (int r = 0; r < world; r++) {
        if (leader[r] == r) number[r] = map.hosts++;
        map.host_of[r] = number[leader[r]];
        map.first[map.host_of[r] + 1]++;
    }
    for (int h = 0; h < map.hosts; h++) map.first[h + 1] += map.first[h];
    int *next = number;
    memcpy(next, map.first, (size_t)map.hosts * sizeof *next);
    for (int r = 0; r < world; r++) map.ranks[next[map.host_of[r]]++] = r;
    free(sorted);
    free(leader);
    free(number);
    return map;
}

static void host_map_free(HostMap *map) {
    free(map->host_of);
    free(map->first);
    free(map->ranks);
}

static int host_ranks(const HostMap *map, int host) { return map->first[host + 1] - map->first[host]; }

/* Groups along mask: how many there are, and how many of them lie inside one host. */
static void count_groups(const Grid *grid, const HostMap *map, unsigned mask, int *groups, int *inside) {
    int *ranks = xcalloc((uint64_t)grid->world_size, sizeof *ranks);
    *groups = *inside = 0;
    for (int position = 0; position < grid->world_size; position++) {
        int index[DIM_COUNT], mine = 0;
        grid_coordinates(grid, position, index);
        int n = group_through(grid, index, mask, ranks, &mine);
        if (mine != 0) continue; /* once a group: at its first member */
        bool one_host = true;
        for (int i = 1; i < n; i++) one_host = one_host && map->host_of[ranks[i]] == map->host_of[ranks[0]];
        ++*groups;
        *inside += one_host;
    }
    free(ranks);
}

/* ---- placement ---- */

/* Adds "tensor = T (pipeline = P, data = D)" for a tensor size that fits; keeps P where that divides. */
static void add_layout(const Grid *grid, int tensor, char *text, size_t capacity) {
    size_t used = strlen(text);
    int rest = grid->world_size / tensor, pipeline = grid->size[DIM_PIPELINE];
    if (rest % pipeline != 0) pipeline = 1;
    snprintf(text + used, capacity - used, "%stensor = %d (with pipeline = %d, data = %d)", text[0] ? " or " : "",
             tensor, pipeline, rest / pipeline);
}

static int refuse_placement(const Grid *grid, const Seat *seats, const HostMap *map, Error *err) {
    int tensor = grid->size[DIM_TENSOR], odd = 0, common = 0;
    char counts[300] = "", nearest[300] = "";
    for (int h = 0; h < map->hosts; h++) {
        for (int a = common, b = host_ranks(map, h); b;) { /* greatest common divisor */
            int remainder = a % b;
            a = b;
            b = remainder;
            common = a;
        }
        if (host_ranks(map, h) % tensor == 0 || ++odd > 4) continue;
        size_t used = strlen(counts);
        snprintf(counts + used, sizeof counts - used, "%shost %.40s has %d rank%s", used ? ", " : "",
                 seats[map->ranks[map->first[h]]].host, host_ranks(map, h), host_ranks(map, h) == 1 ? "" : "s");
    }
    int below = tensor - 1, above = tensor + 1;
    while (common % below != 0) below--;
    while (above <= common && common % above != 0) above++;
    add_layout(grid, below, nearest, sizeof nearest);
    if (above <= common) add_layout(grid, above, nearest, sizeof nearest);
    return error_set(
        err, EXIT_LAUNCH,
        "tensor = %d does not fit: a tensor group must lie inside one host, but %s%s; nearest: %s; or spread "
        "the ranks evenly over the hosts, or set allow_cross_node_tensor = yes",
        tensor, counts, odd > 4 ? ", and so on" : "", nearest);
}

/* Places the ranks in `dense` (tensor groups one after the other): the groups take the remaining
 * coordinates in the order of the dimensions, so that neighbours in the order are neighbours on hosts. */
static void place_dense(Grid *grid, const int *dense) {
    int tensor = grid->size[DIM_TENSOR];
    for (int group = 0; group < grid->world_size / tensor; group++) {
        int index[DIM_COUNT], rest = group;
        for (int i = 0; i < DIM_COUNT; i++) {
            Dim dim = grid->order[i];
            if (dim == DIM_TENSOR) continue;
            index[dim] = rest % grid->size[dim];
            rest /= grid->size[dim];
        }
        for (int t = 0; t < tensor; t++) {
            index[DIM_TENSOR] = t;
            grid->rank_at[grid_position(grid, index)] = dense[group * tensor + t];
        }
    }
}

/* Tensor groups host by host; what is left over on each host (only where crossing is allowed) forms the
 * last groups, across hosts. */
static void pack_hosts(Grid *grid, const HostMap *map) {
    int tensor = grid->size[DIM_TENSOR], n = 0;
    int *dense = xcalloc((uint64_t)grid->world_size, sizeof *dense);
    for (int pass = 0; pass < 2; pass++) {
        for (int h = 0; h < map->hosts; h++) {
            int whole = host_ranks(map, h) / tensor * tensor;
            int from = map->first[h] + (pass == 0 ? 0 : whole);
            int to = pass == 0 ? map->first[h] + whole : map->first[h + 1];
            for (int i = from; i < to; i++) dense[n++] = map->ranks[i];
        }
    }
    place_dense(grid, dense);
    free(dense);
}

int grid_place(Grid *grid, const Seat *seats, int rank, bool allow_cross_node, Error *err) {
    int64_t product = 1;
    grid->rank_at = NULL;
    for (int dim = 0; dim < DIM_COUNT; dim++) product *= grid->size[dim];
    if (product != grid->world_size) {
        return error_set(err, EXIT_LAUNCH, "tensor %d x pipeline %d x data %d = %lld ranks, but %d were started",
                         grid->size[DIM_TENSOR], grid->size[DIM_PIPELINE], grid->size[DIM_DATA], (long long)product,
                         grid->world_size);
    }
    REQUIRE(rank >= 0 && rank < grid->world_size);
    HostMap map = host_map(seats, grid->world_size);
    int groups, inside, uneven = 0;
    grid->rank = rank;
    grid->rank_at = xcalloc((uint64_t)grid->world_size, sizeof *grid->rank_at);
    for (int r = 0; r < grid->world_size; r++) grid->rank_at[r] = r;
    count_groups(grid, &map, DIM_BIT(DIM_TENSOR), &groups, &inside);
    if (inside < groups) {
        for (int h = 0; h < map.hosts; h++) uneven += host_ranks(&map, h) % grid->size[DIM_TENSOR] != 0;
        if (uneven && !allow_cross_node) {
            refuse_placement(grid, seats, &map, err);
            host_map_free(&map);
            grid_free(grid);
            return -1;
        }
        pack_hosts(grid, &map);
    }
    host_map_free(&map);
    for (int position = 0; position < grid->world_size; position++) {
        if (grid->rank_at[position] == rank) grid_coordinates(grid, position, grid->index);
    }
    return 0;
}

void grid_free(Grid *grid) {
    free(grid->rank_at);
    grid->rank_at = NULL;
}

/* ---- the picture ---- */

static void print_hosts(const Grid *grid, const Seat *seats, const HostMap *map, FILE *out) {
    int shown = map->hosts < PICTURE_HOSTS_MAX ? map->hosts : PICTURE_HOSTS_MAX, width = 4;
    for (int h = 0; h < shown; h++) {
        int length = (int)strlen(seats[map->ranks[map->first[h]]].host);
        if (length > width) width = length;
    }
    fprintf(out, "  %-*s  data, pipeline, tensor coordinates = rank\n", width, "host");
    for (int h = 0; h < shown; h++) {
        fprintf(out, "  %-*s", width, seats[map->ranks[map->first[h]]].host);
        for (int position = 0; position < grid->world_size; position++) {
            int index[DIM_COUNT], rank = grid->rank_at[position];
            if (map->host_of[rank] != h) continue;
            grid_coordinates(grid, position, index);
            fprintf(out, "  d%d p%d t%d = %d", index[DIM_DATA], index[DIM_PIPELINE], index[DIM_TENSOR], rank);
        }
        fputc('\n', out);
    }
    if (shown < map->hosts) fprintf(out, "  ... and %d more hosts\n", map->hosts - shown);
}

void grid_print(const Grid *grid, const Seat *seats, FILE *out) {
    HostMap map = host_map(seats, grid->world_size);
    fprintf(out, "grid: data %d x pipeline %d x tensor %d = %d rank%s on %d host%s, order %s, %s, %s\n",
            grid->size[DIM_DATA], grid->size[DIM_PIPELINE], grid->size[DIM_TENSOR], grid->world_size,
            grid->world_size == 1 ? "" : "s", map.hosts, map.hosts == 1 ? "" : "s", dim_name(grid->order[0]),
            dim_name(grid->order[1]), dim_name(grid->order[2]));
    print_hosts(grid, seats, &map, out);
    for (int dim = 0; dim < DIM_COUNT; dim++) {
        if (grid->size[dim] == 1) continue;
        int groups, inside;
        count_groups(grid, &map, DIM_BIT(dim), &groups, &inside);
        fprintf(out, "  %-8s  %d group%s of %d: ", dim_name((Dim)dim), groups, groups == 1 ? "" : "s", grid->size[dim]);
        if (inside == groups) {
            fprintf(out, "inside a node\n");
        } else if (inside == 0) {
            fprintf(out, "across nodes\n");
        } else {
            fprintf(out, "%d inside a node, %d across nodes\n", inside, groups - inside);
        }
    }
    host_map_free(&map);
}
