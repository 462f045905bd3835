/* arena.c - the memory plan, the one allocation made from it, and the proof that it holds. */
#include "base/arena.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/types.h"

enum { ALIGNMENT_BYTES = 64, CANARY_BYTES = 64, FILL = 0xA5, CANARY = 0x5C };

static const char *const owner_names[OWNER_COUNT] = {"parameters",    "gradients", "optimizer", "activations",
                                                     "communication", "workspace", "data",      "checkpoint"};

const char *memory_owner_name(MemoryOwner owner) { return owner_names[owner]; }

void arena_plan_begin(Arena *arena, bool guarded) { *arena = (Arena){.guarded = guarded, .memory.fd = -1}; }

static char *arena_address(const Arena *arena, size_t offset) { return (char *)arena->memory.base + offset; }

static void add_entry(MemoryEntry **list, int *n, int *capacity, const MemoryEntry *entry) {
    if (*n == *capacity) {
        *capacity = *capacity ? 2 * *capacity : 64;
        *list = xrealloc(*list, (uint64_t)*capacity * sizeof **list);
    }
    (*list)[(*n)++] = *entry;
}

static void *arena_plan(Arena *arena, MemoryOwner owner, const char *lifetime, size_t bytes, const char *name) {
    MemoryEntry entry = {.owner = owner, .lifetime = lifetime, .bytes = bytes, .offset = arena->bytes};
    snprintf(entry.name, sizeof entry.name, "%s", name);
    add_entry(&arena->entries, &arena->n_entries, &arena->capacity, &entry);
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

void arena_note(Arena *arena, MemoryOwner owner, const char *lifetime, size_t bytes, const char *name) {
    if (arena->committed || bytes == 0) return;
    MemoryEntry entry = {.owner = owner, .lifetime = lifetime, .bytes = bytes};
    snprintf(entry.name, sizeof entry.name, "%s", name);
    add_entry(&arena->notes, &arena->n_notes, &arena->notes_capacity, &entry);
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

static size_t bytes_of(const MemoryEntry *list, int n, MemoryOwner owner) {
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        if (owner == OWNER_COUNT || list[i].owner == owner) bytes += list[i].bytes;
    }
    return bytes;
}

size_t arena_owner_bytes(const Arena *arena, MemoryOwner owner) {
    return bytes_of(arena->entries, arena->n_entries, owner) + bytes_of(arena->notes, arena->n_notes, owner);
}

size_t arena_outside_bytes(const Arena *arena) { return bytes_of(arena->notes, arena->n_notes, OWNER_COUNT); }

size_t arena_planned_bytes(const Arena *arena) { return arena->bytes + arena_outside_bytes(arena); }

static void print_entries(const MemoryEntry *list, int n, FILE *out) {
    for (int i = 0; i < n; i++) {
        const MemoryEntry *e = &list[i];
        fprintf(out, "%-40s %-14s %-12s %16zu\n", e->name, owner_names[e->owner], e->lifetime, e->bytes);
    }
}

void arena_print(const Arena *arena, FILE *out, bool by_buffer) {
    if (by_buffer) {
        fprintf(out, "%-40s %-14s %-12s %16s\n", "buffer", "owner", "lifetime", "bytes");
        print_entries(arena->entries, arena->n_entries, out);
        print_entries(arena->notes, arena->n_notes, out);
    }
    size_t listed = 0;
    for (int owner = 0; owner < OWNER_COUNT; owner++) {
        size_t bytes = arena_owner_bytes(arena, (MemoryOwner)owner);
        listed += bytes;
        fprintf(out, "%-14s %16zu bytes\n", owner_names[owner], bytes);
    }
    const size_t all = arena_planned_bytes(arena);
    fprintf(out, "%-14s %16zu bytes\n%-14s %16zu bytes\n", "alignment", all - listed, "in all", all);
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
    const size_t whole = (size_t)round_up((int64_t)used, 4);
    return whole < e->bytes ? whole : e->bytes;
}

size_t arena_untouched(const Arena *arena, int entry) {
    const MemoryEntry *e = &arena->entries[entry];
    const char *bytes = arena_address(arena, e->offset);
    uint64_t fill, word;
    size_t untouched = 0;
    memset(&fill, FILL, sizeof fill);
    for (size_t at = 0; at + sizeof word <= e->bytes; at += sizeof word) {
        memcpy(&word, bytes + at, sizeof word);
        if (word == fill) untouched += sizeof word;
    }
    return untouched;
}

void arena_free(Arena *arena) {
    if (arena->committed) device_memory_destroy(&arena->memory);
    free(arena->entries);
    free(arena->notes);
    *arena = (Arena){.memory.fd = -1};
}
