/* grid.h - the process grid: a list of named dimensions, a value passed down. Pure arithmetic. */
#ifndef TRIDENT_PARALLEL_GRID_H
#define TRIDENT_PARALLEL_GRID_H

#include <stdbool.h>
#include <stdio.h>

#include "base/check.h"

typedef enum { DIM_TENSOR, DIM_PIPELINE, DIM_DATA, DIM_COUNT } Dim;
#define DIM_BIT(dim) (1u << (dim))

const char *dim_name(Dim dim);

typedef struct {
    int size[DIM_COUNT];
    Dim order[DIM_COUNT]; /* order[0] varies fastest */
    int world_size;
    int rank;             /* launcher's rank of this process */
    int index[DIM_COUNT]; /* coordinates of this process */
    int *rank_at;         /* (world_size) launcher's rank at each grid position; owned */
} Grid;

/* order_text: "tensor, pipeline, data" in any order. -1 with err (EXIT_CONFIG). */
int grid_parse_order(Dim order[DIM_COUNT], const char *order_text, Error *err);
/* Position in the grid of coordinates: order[0] varies fastest. */
int grid_position(const Grid *grid, const int index[DIM_COUNT]);
void grid_coordinates(const Grid *grid, int position, int index[DIM_COUNT]);
/* Launcher's rank at coordinates. */
int grid_rank_at(const Grid *grid, const int index[DIM_COUNT]);

/* The ranks of this process's group along the dimensions in mask, in grid order (order[0] fastest);
 * returns how many; *mine is this process's index in it. ranks has room for world_size. */
int grid_group(const Grid *grid, unsigned mask, int *ranks, int *mine);

/* Where a process sits. */
typedef struct {
    char host[256];
    int local_device;
} Seat;

/* Lays the grid over the seats (one per launcher rank) so that every tensor group lies inside one
 * host wherever that is possible, whatever the distribution of ranks over hosts; keeps launcher
 * order where that already does. Fills grid->rank_at and grid->index. Where a tensor group would
 * cross hosts: -1 with err (EXIT_LAUNCH; the reason and the nearest layout that fits), unless
 * allow_cross_node. sizes and order must be set; seats has world_size entries. */
int grid_place(Grid *grid, const Seat *seats, int rank, bool allow_cross_node, Error *err);
/* The picture: which rank sits where, which groups are inside a node and which cross. */
void grid_print(const Grid *grid, const Seat *seats, FILE *out);
void grid_free(Grid *grid);

#endif
