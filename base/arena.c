/* arena.c - the memory plan, the one allocation made from it, and the proof that it holds. */
#include "base/arena.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/types.h"

enum { ALIGNMENT_BYTES = 64, CANARY_BYTES = 64, FILL = 0xA5, CANARY = 0x5C };

static const char *const owner_names[OWNER_COUNT] = {"parameters",  "gradients",     "optimizer",
                                                     "activations", "communication", "workspace"};

const char *memory_owner_name(MemoryOwner owner) { return owner_names[owner]; }

void arena_plan_begin(Arena *arena, bool guarded) { *arena = (Arena){.guarded = guarded, .memory.fd = -1}; }

static char *arena_address(const Arena *arena, size_t offset) { return (char *)arena->memory.base + offset; }

static void *arena_plan(Arena *arena, MemoryOwner owner, const char *lifetime, size_t bytes, const char *name) {
    if (arena->n_entries == arena->capacity) {
        arena->capacity = arena->capacity ? 2 * arena->capacity : 64;
        arena->entries = xrealloc(arena->entries, (uint64_t)arena->capacity * sizeof *arena->entries);
    }
    MemoryEntry *entry = &arena->entries[arena->n_entries++];
    *entry = (MemoryEntry){.owner = owner, .lifetime = lifetime, .bytes = bytes, .offset = arena->bytes};
    snprintf(entry->name, sizeof entry->name, "%s", name);
    arena->bytes += (size_t)round_up((int64_t)bytes, ALIGNMENT_BYTES) + (arena->guarded ? CANARY_BYTES : 0);
    return NULL;
}

void *arena_take(Arena *arena, MemoryOwner owner, const char *lifetime, size_t bytes, const char *name_format, ...) {
    char name[sizeof arena->entries->name];
    va_list args;
    va_start(args, name_format);
    vsnprintf(name, sizeof name, name_format, args);
    va_end(args);
    if (!arena->committed) return arena_plan(arena, owner, lifetime, bytes, name);
    REQUIRE(!arena->sealed);
    REQUIRE(arena->n_taken < arena->n_entries);
    const MemoryEntry *entry = &arena->entries[arena->n_taken++];
    if (strcmp(entry->name, name) != 0 || entry->bytes != bytes || entry->owner != owner) {
        die(EXIT_INTERNAL, "memory plan has %s (%zu bytes) where the run takes %s (%zu bytes)", entry->name,
            entry->bytes, name, bytes);
    }
    return arena_address(arena, entry->offset);
}

void arena_commit(Arena *arena) {
    REQUIRE(!arena->committed);
    if (arena->bytes == 0) arena->bytes = ALIGNMENT_BYTES;
    arena->memory = device_memory_create(arena->bytes);
    arena->committed = true;
    if (!arena->guarded) return;
    memset(arena->memory.base, CANARY, arena->bytes);
    for (int i = 0; i < arena->n_entries; i++) {
        memset(arena_address(arena, arena->entries[i].offset), FILL, arena->entries[i].bytes);
    }
}

void arena_seal(Arena *arena) {
    if (arena->n_taken != arena->n_entries) {
        die(EXIT_INTERNAL, "memory plan has %d buffers, the run took %d; the first unused one is %s", arena->n_entries,
            arena->n_taken, arena->entries[arena->n_taken].name);
    }
    arena->sealed = true;
}

size_t arena_owner_bytes(const Arena *arena, MemoryOwner owner) {
    size_t bytes = 0;
    for (int i = 0; i < arena->n_entries; i++) {
        if (arena->entries[i].owner == owner) bytes += arena->entries[i].bytes;
    }
    return bytes;
}

void arena_print(const Arena *arena, FILE *out, bool by_buffer) {
    if (by_buffer) {
        fprintf(out, "%-40s %-14s %-12s %16s\n", "buffer", "owner", "lifetime", "bytes");
        for (int i = 0; i < arena->n_entries; i++) {
            const MemoryEntry *e = &arena->entries[i];
            fprintf(out, "%-40s %-14s %-12s %16zu\n", e->name, owner_names[e->owner], e->lifetime, e->bytes);
        }
    }
    size_t listed = 0;
    for (int owner = 0; owner < OWNER_COUNT; owner++) {
        size_t bytes = arena_owner_bytes(arena, (MemoryOwner)owner);
        listed += bytes;
        fprintf(out, "%-14s %16zu bytes\n", owner_names[owner], bytes);
    }
    fprintf(out, "%-14s %16zu bytes\n%-14s %16zu bytes\n", "alignment", arena->bytes - listed, "in all", arena->bytes);
}

const char *arena_check(const Arena *arena) {
    if (!arena->guarded || !arena->committed) return NULL;
    for (int i = 0; i < arena->n_entries; i++) {
        const MemoryEntry *e = &arena->entries[i];
        size_t end = i + 1 < arena->n_entries ? arena->entries[i + 1].offset : arena->bytes;
        for (size_t at = e->offset + e->bytes; at < end; at++) {
            if (*(unsigned char *)arena_address(arena, at) != CANARY) return e->name;
        }
    }
    return NULL;
}

size_t arena_high_water(const Arena *arena, int entry) {
    const MemoryEntry *e = &arena->entries[entry];
    const unsigned char *bytes = (const unsigned char *)arena_address(arena, e->offset);
    size_t used = e->bytes;
    while (used > 0 && bytes[used - 1] == FILL) used--;
    return used;
}

void arena_free(Arena *arena) {
    if (arena->committed) device_memory_destroy(&arena->memory);
    free(arena->entries);
    *arena = (Arena){.memory.fd = -1};
}
