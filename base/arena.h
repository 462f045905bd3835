/* arena.h - the memory plan and the one allocation made from it.
 *
 * The same code runs twice over an arena: while it is PLANNING, arena_take only lists (name, owner,
 * bytes, lifetime) and returns NULL-based addresses that nobody may touch; arena_commit makes the
 * one device allocation; in the second run arena_take hands out the memory, and dies if name, order
 * or size differ from the plan. So planned and used are equal by construction, and `arena_check`
 * proves on top that canaries between buffers are intact.
 *
 * Memory that is taken elsewhere (by malloc, before the first step) is part of the plan too: arena_note lists it. */
#ifndef TRIDENT_BASE_ARENA_H
#define TRIDENT_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/device.h"

typedef enum {
    OWNER_PARAMETERS,
    OWNER_GRADIENTS,
    OWNER_OPTIMIZER,
    OWNER_ACTIVATIONS,
    OWNER_COMMUNICATION,
    OWNER_WORKSPACE,
    OWNER_DATA,       /* batches that are read ahead */
    OWNER_CHECKPOINT, /* while saving */
    OWNER_COUNT
} MemoryOwner;

typedef struct {
    char name[56];
    MemoryOwner owner;
    const char *lifetime; /* static text: "run", "micro-batch", "layer", ... */
    size_t bytes;         /* as asked for */
    size_t offset;        /* from the arena's base; 64-byte aligned */
} MemoryEntry;

typedef struct {
    MemoryEntry *entries;
    int n_entries, capacity, n_taken;
    size_t bytes;       /* in all, with alignment and canaries */
    MemoryEntry *notes; /* memory outside the arena; offset is 0 */
    int n_notes, notes_capacity;
    bool committed, sealed;
    bool guarded; /* canaries between buffers, and buffers filled with a pattern (tests) */
    DeviceMemory memory;
} Arena;

void arena_plan_begin(Arena *arena, bool guarded);
void *arena_take(Arena *arena, MemoryOwner owner, const char *lifetime, size_t bytes, const char *name_format, ...)
    __attribute__((format(printf, 5, 6)));
void arena_commit(Arena *arena);
/* Dies if the second run took fewer buffers than planned; later takes die. */
void arena_seal(Arena *arena);
/* While planning: memory that its owner takes outside the arena. Ignored in the second run. */
void arena_note(Arena *arena, MemoryOwner owner, const char *lifetime, size_t bytes, const char *name);
size_t arena_outside_bytes(const Arena *arena);
/* All of the plan: the arena, and what was noted. */
size_t arena_planned_bytes(const Arena *arena);
/* Of the owner, in the arena and noted. */
size_t arena_owner_bytes(const Arena *arena, MemoryOwner owner);
const char *memory_owner_name(MemoryOwner owner);
/* The plan as a table: by buffer, or by owner only. */
void arena_print(const Arena *arena, FILE *out, bool by_buffer);
/* Guarded arenas: NULL, or the name of a buffer behind which the canary was overwritten. */
const char *arena_check(const Arena *arena);
/* Guarded arenas: bytes of entry i up to the last that was written (high-water mark). Counted in whole words of
 * four bytes: a byte that was written may look like the fill pattern. */
size_t arena_high_water(const Arena *arena, int entry);
/* Guarded arenas: bytes of entry i, in aligned words of eight, that were never written. */
size_t arena_untouched(const Arena *arena, int entry);
void arena_free(Arena *arena);

#endif
