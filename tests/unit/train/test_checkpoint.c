/* test_checkpoint.c - any partition reads any other; every damage is noticed; the right one is found and kept. */
#include "tests/unit/train/checkpoint_world.h"

#include <dirent.h>
#include <math.h>

#include "base/file.h"
#include "train/checkpoint_files.h"
#include "train/checkpoint_piece.h"
#include "train/safetensors.h"

/* ---- any layout reads any layout ---- */

START_TEST(any_partition_reads_any_other) {
    seed_begin();
    const int rounds = getenv("TRIDENT_LONG") ? 3000 : 150;
    for (int round = 0; round < rounds; round++) {
        const int writers = 1 + (int)draw(RANKS_MAX), readers = 1 + (int)draw(RANKS_MAX);
        Logical logical = logical_random();
        Partition *written = partition_random(&logical, writers), *read = partition_random(&logical, readers);
        save_good(scratch("any"), round, 1, &logical, written, writers);
        char *step_dir = step_directory(scratch("any"), round);
        for (int rank = 0; rank < readers; rank++) {
            Error err;
            ck_assert_msg(load_rank(step_dir, read, rank, &err) == 0, "%s " SEED_FORMAT, err.message, SEED_VALUE);
        }
        for (int i = 0; i < read->n; i++) {
            const int64_t wrong = piece_differs(&logical, &read->list[i]);
            ck_assert_msg(wrong < 0, "round %d, piece %d (%s), element %lld " SEED_FORMAT, round, i,
                          read->list[i].piece.name, (long long)wrong, SEED_VALUE);
        }
        free(step_dir);
        partition_free(written);
        partition_free(read);
    }
}
END_TEST

/* Pieces whose rows are long, and columns of which a reader wants few: more than a buffer of both kinds. */
START_TEST(large_arrays) {
    const Logical logical = {
        .list = {{"param/wide", DT_F32, 2, {3, 700000}}, {"param/tall", DT_F32, 2, {40000, 40}}}, .n = 2, .version = 5};
    Partition *written = partition_whole(&logical), *read = xcalloc(1, sizeof *read);
    save_good(scratch("large"), 1, 0, &logical, written, 1);
    for (int i = 0; i < 2; i++) {
        CheckpointPiece piece = whole_piece(&logical.list[i]);
        piece.first[0] = 1;
        piece.count[0] -= 1;
        piece.first[1] = 3;
        piece.count[1] -= i ? 20 : 7;
        piece.flat_count = piece.count[0] * piece.count[1];
        add_owned(read, i, piece, 0, true);
    }
    Error err;
    char *step_dir = step_directory(scratch("large"), 1);
    ck_assert_msg(load_rank(step_dir, read, 0, &err) == 0, "%s", err.message);
    for (int i = 0; i < read->n; i++) ck_assert_int_lt(piece_differs(&logical, &read->list[i]), 0);
    free(step_dir);
    partition_free(written);
    partition_free(read);
}
END_TEST

START_TEST(state_comes_back) {
    const Logical logical = logical_fixed(1);
    Partition *partition = partition_rows(&logical, 3);
    save_good(scratch("state"), 100000001, 0, &logical, partition, 3);
    Error err;
    CheckpointState state;
    char *step_dir = checkpoint_find(scratch("state"), &err);
    ck_assert_ptr_nonnull(step_dir);
    ck_assert_msg(checkpoint_read_state(step_dir, &state, &err) == 0, "%s", err.message);
    ck_assert_int_eq(state.step, 100000001);
    ck_assert_int_eq(state.samples, 800000008);
    ck_assert_int_eq(state.tokens, 12800000128);
    ck_assert_int_eq(state.skipped, 1);
    ck_assert_str_eq(state.config_text, "[model]\nname = \"caf\xc3\xa9\"\n");
    ck_assert(state.data_fingerprint == UINT64_C(0xfedcba9876543210));
    ck_assert_int_eq(state.n_corpora, 2);
    ck_assert_int_eq(state.corpus_counters[0], 300000003);
    ck_assert_int_eq(state.corpus_counters[1], 500000005);
    ck_assert(state.last_loss == 1.0 / 3.0);
    ck_assert(state.grid_size[0] == 1 && state.grid_size[1] == 2 && state.grid_size[2] == 3);
    ck_assert_str_eq(state.extra_json, "{\"loss_scale\":1024,\"list\":[1,2]}");
    CheckpointArray *arrays;
    ck_assert_int_eq(checkpoint_list(step_dir, &arrays, &err), 3);
    ck_assert_str_eq(arrays[0].name, "adam_m/embed.weight");
    ck_assert(arrays[0].dtype == DT_F64 && arrays[0].dims == 2 && arrays[0].shape[0] == 6 && arrays[0].shape[1] == 5);
    ck_assert_str_eq(arrays[2].name, "param/norm.weight");
    free(arrays);
    checkpoint_state_free(&state);
    free(step_dir);
    partition_free(partition);
}
END_TEST

/* Two saves of the same state differ in the names of files, and in nothing else. */
START_TEST(the_same_state_gives_the_same_bytes) {
    const Logical logical = logical_fixed(1);
    Partition *partition = partition_rows(&logical, 3);
    Manifest manifests[2];
    Error err;
    for (int i = 0; i < 2; i++) {
        save_good(scratch(i ? "two" : "one"), 5, 0, &logical, partition, 3);
        char *step_dir = step_directory(scratch(i ? "two" : "one"), 5);
        ck_assert_msg(manifest_read(step_dir, &manifests[i], &err) == 0, "%s", err.message);
        free(step_dir);
    }
    ck_assert_int_eq(manifests[0].n_files, 3);
    for (int i = 0; i < 3; i++) {
        ManifestFile a = manifests[0].files[i], b = manifests[1].files[i];
        ck_assert_str_ne(a.name, b.name);
        ck_assert(a.bytes == b.bytes && a.xxh3 == b.xxh3 && a.header_xxh3 == b.header_xxh3 && a.set == b.set);
        free(manifests[0].files[i].name);
        free(manifests[1].files[i].name);
        manifests[0].files[i].name = xstrdup("x");
        manifests[1].files[i].name = xstrdup("x");
    }
    char *one = manifest_to_text(&manifests[0], &err), *two = manifest_to_text(&manifests[1], &err);
    ck_assert_str_eq(one, two);
    free(one);
    free(two);
    manifest_free(&manifests[0]);
    manifest_free(&manifests[1]);
    partition_free(partition);
}
END_TEST

/* ---- damage ---- */

typedef struct {
    char *dir, *step_dir;
    char *paths[RANKS_MAX + 1]; /* the manifest first */
    char *bytes[RANKS_MAX + 1];
    size_t n_bytes[RANKS_MAX + 1];
    int n_files;
    Logical logical;
    Partition *partition; /* everything, on one rank */
} Victim;

/* Two rows for each of three ranks: shards of one length. */
static Victim victim_make(const char *name, int64_t step, uint64_t version) {
    Victim v = {.dir = xstrdup(scratch(name)), .logical = logical_fixed(version)};
    Partition *written = partition_rows(&v.logical, 3);
    save_good(v.dir, step, 0, &v.logical, written, 3);
    partition_free(written);
    v.step_dir = step_directory(v.dir, step);
    Manifest manifest;
    Error err;
    ck_assert_int_eq(manifest_read(v.step_dir, &manifest, &err), 0);
    v.n_files = 1 + manifest.n_files;
    for (int i = 0; i < v.n_files; i++) {
        v.paths[i] = xasprintf("%s/%s", v.step_dir, i ? manifest.files[i - 1].name : "manifest.json");
        v.bytes[i] = slurp(v.paths[i], &v.n_bytes[i]);
    }
    manifest_free(&manifest);
    v.partition = partition_whole(&v.logical);
    return v;
}

static void victim_free(Victim *v) {
    for (int i = 0; i < v->n_files; i++) {
        free(v->paths[i]);
        free(v->bytes[i]);
    }
    free(v->dir);
    free(v->step_dir);
    partition_free(v->partition);
}

static void put(const char *path, const void *bytes, size_t n) {
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(bytes, 1, n, file), n);
    ck_assert_int_eq(fclose(file), 0);
}

/* Loading must fail, change nothing, and name the file (or what else is given). */
static void refused(Victim *v, const char *what, long at, const char *named) {
    Error err = {0};
    wipe(v->partition, 0x5a);
    ck_assert_msg(load_rank(v->step_dir, v->partition, -1, &err) == -1, "%s at %ld went unnoticed", what, at);
    ck_assert_msg(err.status == EXIT_CHECKPOINT, "%s at %ld: status %d", what, at, err.status);
    ck_assert_msg(strstr(err.message, named) != NULL, "%s at %ld: \"%s\" does not name %s", what, at, err.message,
                  named);
    ck_assert_msg(wiped(v->partition, 0x5a), "%s at %ld: pieces were changed", what, at);
}

static void intact(Victim *v) {
    Error err = {0};
    ck_assert_msg(load_rank(v->step_dir, v->partition, -1, &err) == 0, "%s", err.message);
}

START_TEST(every_flipped_bit_is_noticed) {
    seed_begin();
    Victim v = victim_make("flips", 3, 1);
    for (int f = 0; f < v.n_files; f++) {
        for (size_t at = 0; at < v.n_bytes[f]; at++) {
            const char bit = (char)(1 << draw(8));
            v.bytes[f][at] ^= bit;
            put(v.paths[f], v.bytes[f], v.n_bytes[f]);
            refused(&v, "a flipped bit", (long)at, v.paths[f]);
            v.bytes[f][at] ^= bit;
        }
        put(v.paths[f], v.bytes[f], v.n_bytes[f]);
    }
    intact(&v);
    victim_free(&v);
}
END_TEST

START_TEST(every_truncation_is_noticed) {
    Victim v = victim_make("cuts", 3, 1);
    for (int f = 0; f < v.n_files; f++) {
        for (size_t n = 0; n < v.n_bytes[f]; n += 1 + n / 40) {
            put(v.paths[f], v.bytes[f], n);
            refused(&v, "a cut", (long)n, v.paths[f]);
            Error err = {0};
            char *found = checkpoint_find(v.dir, &err);
            ck_assert_msg(!found && err.status == EXIT_CHECKPOINT, "%s cut to %zu is found complete", v.paths[f], n);
        }
        char *longer = xcalloc(1, v.n_bytes[f] + 8);
        memcpy(longer, v.bytes[f], v.n_bytes[f]);
        put(v.paths[f], longer, v.n_bytes[f] + 8);
        refused(&v, "8 more bytes", 0, v.paths[f]);
        free(longer);
        ck_assert_int_eq(unlink(v.paths[f]), 0);
        refused(&v, "a missing file", 0, v.paths[f]);
        put(v.paths[f], v.bytes[f], v.n_bytes[f]);
    }
    intact(&v);
    victim_free(&v);
}
END_TEST

START_TEST(exchanged_files_are_noticed) {
    Victim v = victim_make("swap", 3, 1), other = victim_make("other", 3, 2), later = victim_make("later", 4, 1);
    ck_assert_uint_eq(v.n_bytes[1], v.n_bytes[2]);
    put(v.paths[1], v.bytes[2], v.n_bytes[2]);
    put(v.paths[2], v.bytes[1], v.n_bytes[1]);
    refused(&v, "swapped shards", 0, v.paths[1]);
    put(v.paths[1], v.bytes[1], v.n_bytes[1]);
    put(v.paths[2], other.bytes[2], other.n_bytes[2]);
    refused(&v, "a shard of another save", 0, v.paths[2]);
    put(v.paths[2], v.bytes[2], v.n_bytes[2]);
    intact(&v);
    put(v.paths[0], later.bytes[0], later.n_bytes[0]);
    refused(&v, "the manifest of another step", 0, "step 4, but its directory says step 3");
    victim_free(&v);
    victim_free(&other);
    victim_free(&later);
}
END_TEST

/* Damage in what a load does not need does not stop it; looking at everything finds it. */
START_TEST(only_what_is_needed_is_read) {
    Victim v = victim_make("needed", 3, 1);
    v.bytes[1][v.n_bytes[1] - 1] ^= 1; /* wide elements come first: the last bytes are of param */
    put(v.paths[1], v.bytes[1], v.n_bytes[1]);
    CheckpointPiece piece = v.partition->list[2].piece; /* adam_m */
    Error err = {0};
    ck_assert_msg(checkpoint_load(v.step_dir, &piece, 1, &err) == 0, "%s", err.message);
    ck_assert_int_lt(piece_differs(&v.logical, &v.partition->list[2]), 0);
    refused(&v, "a damaged part", 0, "param/embed.weight");
    FILE *sink = fopen("/dev/null", "w");
    ck_assert_int_eq(checkpoint_inspect(v.step_dir, false, sink, &err), 0);
    ck_assert_int_eq(checkpoint_inspect(v.step_dir, true, sink, &err), -1);
    ck_assert_contains(err.message, v.paths[1]);
    fclose(sink);
    victim_free(&v);
}
END_TEST

/* Writes the manifest again, with a right checksum, after a change. */
static void rewrite(const Victim *v, void (*change)(Manifest *manifest)) {
    Manifest manifest;
    Error err;
    put(v->paths[0], v->bytes[0], v->n_bytes[0]);
    ck_assert_int_eq(manifest_read(v->step_dir, &manifest, &err), 0);
    change(&manifest);
    char *text = manifest_to_text(&manifest, &err);
    put(v->paths[0], text, strlen(text));
    free(text);
    manifest_free(&manifest);
}

static void drop_last_file(Manifest *m) { free(m->files[--m->n_files].name); }

static void double_a_file(Manifest *m) {
    m->files = xrealloc(m->files, ((uint64_t)m->n_files + 1) * sizeof *m->files);
    m->files[m->n_files] = m->files[0];
    m->files[m->n_files++].name = xstrdup(m->files[0].name);
}

static void leave_the_directory(Manifest *m) {
    free(m->files[0].name);
    m->files[0].name = xstrdup("../secret");
}

static void change_a_shape(Manifest *m) { m->arrays[1].shape[0]++; }
static void nonsense_index(Manifest *m) { m->sets[0].arrays[0] = m->n_arrays; }
static void unsorted_arrays(Manifest *m) { m->arrays[0].name[0] = 'z'; }
static void negative_step(Manifest *m) { m->state.step = -1; }

/* A manifest that is whole, but of a program with a fault. */
START_TEST(contradictions_are_noticed) {
    Victim v = victim_make("gaps", 3, 1);
    rewrite(&v, drop_last_file);
    refused(&v, "a gap", 0, "the files hold 20 of the 30 elements of param/embed.weight");
    rewrite(&v, double_a_file);
    refused(&v, "an overlap", 0, "both hold row 0, column 0 of param/embed.weight");
    rewrite(&v, leave_the_directory);
    refused(&v, "a path", 0, "files: name");
    rewrite(&v, change_a_shape);
    refused(&v, "another shape", 0, "param/embed.weight has shape (7, 5), this run needs (6, 5)");
    rewrite(&v, nonsense_index);
    refused(&v, "an index", 0, "array_sets");
    rewrite(&v, unsorted_arrays);
    refused(&v, "the order", 0, "ascending");
    rewrite(&v, negative_step);
    refused(&v, "the step", 0, "\"step\" must be");
    victim_free(&v);
}
END_TEST

START_TEST(other_arrays_than_saved) {
    Victim v = victim_make("wants", 3, 1);
    CheckpointPiece piece = v.partition->list[0].piece;
    Error err;
    piece.dtype = DT_F64;
    ck_assert_int_eq(checkpoint_load(v.step_dir, &piece, 1, &err), -1);
    ck_assert_contains(err.message, "param/embed.weight was saved as f32, this run needs f64");
    piece = v.partition->list[1].piece;
    piece.dims = 2;
    piece.shape[1] = piece.count[1] = 1;
    ck_assert_int_eq(checkpoint_load(v.step_dir, &piece, 1, &err), -1);
    ck_assert_contains(err.message, "param/norm.weight has shape (7), this run needs (7, 1)");
    piece.name = "param/norm.bias";
    ck_assert_int_eq(checkpoint_load(v.step_dir, &piece, 1, &err), -1);
    ck_assert_contains(err.message, "has no array param/norm.bias");
    ck_assert_int_eq(err.status, EXIT_CHECKPOINT);
    victim_free(&v);
}
END_TEST

/* ---- writing what cannot be read is refused at once ---- */

START_TEST(incomplete_partitions_are_not_published) {
    const Logical logical = logical_fixed(1);
    for (int twice = 0; twice < 2; twice++) {
        Partition *partition = partition_rows(&logical, 3);
        for (int i = 0; i < partition->n; i++) piece_fill(&logical, &partition->list[i]);
        if (twice) add_owned(partition, 1, partition->list[3].piece, 0, true);
        else partition->list[1].piece.write = false;
        SaveJob job = {.dir = scratch("partial"), .step = 9, .partition = partition};
        ck_assert_int_eq(save_all(&job, 3), -1);
        ck_assert_contains(job.err[0].message, "bytes of arrays that have");
        Error err = {0};
        ck_assert_ptr_null(checkpoint_find(job.dir, &err));
        ck_assert_msg(rmdir(job.dir) == 0, "something was left over");
        partition_free(partition);
    }
}
END_TEST

/* ---- finding and keeping ---- */

/* Names below dir, sorted, with spaces between them. */
static char *listing(const char *dir) {
    struct dirent **entries;
    char *text = xstrdup("");
    const int n = scandir(dir, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        if (entries[i]->d_name[0] != '.') {
            char *longer = xasprintf("%s%s%s", text, *text ? " " : "", entries[i]->d_name);
            free(text);
            text = longer;
        }
        free(entries[i]);
    }
    if (n >= 0) free(entries);
    return text;
}

static void expect_listing(const char *dir, const char *expected) {
    char *text = listing(dir);
    ck_assert_str_eq(text, expected);
    free(text);
}

START_TEST(keep) {
    const Logical logical = logical_fixed(1);
    Partition *partition = partition_rows(&logical, 2);
    const char *dir = scratch("keep");
    for (int64_t step = 10; step <= 50; step += 10) save_good(dir, step, step == 50 ? 2 : 3, &logical, partition, 2);
    expect_listing(dir, "step-00000040 step-00000050");
    /* Older than what is there: the new one stays, and the newer ones do. */
    save_good(dir, 30, 1, &logical, partition, 2);
    expect_listing(dir, "step-00000030 step-00000040 step-00000050");
    save_good(dir, 60, 0, &logical, partition, 2);
    expect_listing(dir, "step-00000030 step-00000040 step-00000050 step-00000060");
    partition_free(partition);
}
END_TEST

START_TEST(leftovers_go_and_strangers_stay) {
    const Logical logical = logical_fixed(1);
    Partition *partition = partition_rows(&logical, 2);
    char *dir = xstrdup(scratch("left"));
    save_good(dir, 10, 0, &logical, partition, 2);
    /* An interrupted save, a damaged checkpoint, what a user put there, the shard of an earlier attempt. */
    static const char *const made[] = {"step-00000005/shard-00000-0123456789abcdef.safetensors",
                                       "step-00000006/manifest.json",
                                       "step-00000007/notes.txt",
                                       "best/manifest.json",
                                       "step-00000020/manifest.json.tmp.0123456789abcdef",
                                       "step-00000020/shard-00001-0123456789abcdef.safetensors"};
    for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
        char *path = xasprintf("%s/%s", dir, made[i]);
        char *parent = xasprintf("%.*s", (int)(strrchr(path, '/') - path), path);
        Error err;
        ck_assert_int_eq(directory_make(parent, &err, EXIT_CHECKPOINT), 0);
        put(path, "x", 1);
        free(parent);
        free(path);
    }
    save_good(dir, 20, 1, &logical, partition, 2);
    expect_listing(dir, "best step-00000006 step-00000007 step-00000020");
    char *step_dir = step_directory(dir, 20);
    char *names = listing(step_dir);
    ck_assert_uint_eq(strlen(names), strlen("manifest.json") + 2 * strlen(" shard-00000-0123456789abcdef.safetensors"));
    free(names);
    free(step_dir);
    free(dir);
    partition_free(partition);
}
END_TEST

START_TEST(the_newest_complete_one_is_found) {
    const Logical old = logical_fixed(1), new = logical_fixed(2);
    Partition *partition = partition_rows(&old, 2);
    char *dir = xstrdup(scratch("find"));
    Error err = {.status = 99};
    ck_assert_ptr_null(checkpoint_find(dir, &err));
    ck_assert_int_eq(err.status, 0);
    save_good(dir, 99999999, 0, &old, partition, 2);
    save_good(dir, 100000000, 0, &new, partition, 2);
    ck_assert(holds(dir, 100000000, &new));
    /* A step directory itself, with slashes behind. */
    char *step_dir = xasprintf("%s/step-99999999//", dir), *found = checkpoint_find(step_dir, &err);
    ck_assert_ptr_nonnull(found);
    ck_assert_uint_eq(strlen(found), strlen(step_dir) - 2);
    free(found);
    /* A newer one without a manifest, and one whose manifest is empty. */
    for (int i = 0; i < 2; i++) {
        char *later = xasprintf("%s/step-10000000%d", dir, 1 + i), *manifest = xasprintf("%s/manifest.json", later);
        ck_assert_int_eq(mkdir(later, 0777), 0);
        if (i) put(manifest, "", 0);
        ck_assert(holds(dir, 100000000, &new));
        ck_assert_ptr_null(checkpoint_find(later, &err));
        ck_assert_int_eq(err.status, EXIT_CHECKPOINT);
        ck_assert_contains(err.message, manifest);
        free(later);
        free(manifest);
    }
    ck_assert_ptr_null(checkpoint_find("Makefile", &err));
    ck_assert_int_eq(err.status, EXIT_CHECKPOINT);
    free(step_dir);
    free(dir);
    partition_free(partition);
}
END_TEST

START_TEST(saving_a_step_again) {
    const Logical old = logical_fixed(1), new = logical_fixed(2);
    Partition *two = partition_rows(&old, 2), *three = partition_rows(&old, 3);
    const char *dir = scratch("again");
    save_good(dir, 7, 2, &old, two, 2);
    save_good(dir, 7, 2, &new, three, 3);
    ck_assert(holds(dir, 7, &new));
    save_good(dir, 7, 2, &old, two, 2);
    ck_assert(holds(dir, 7, &old));
    expect_listing(dir, "step-00000007");
    partition_free(two);
    partition_free(three);
}
END_TEST

/* ---- parts ---- */

START_TEST(names_of_directories) {
    ck_assert_int_eq(step_of_directory("step-00000012"), 12);
    ck_assert_int_eq(step_of_directory("/a/b/step-123456789///"), 123456789);
    ck_assert_int_eq(step_of_directory("step-0000001"), -1);
    ck_assert_int_eq(step_of_directory("step-0000001x"), -1);
    ck_assert_int_eq(step_of_directory("xstep-00000001"), -1);
    ck_assert_int_eq(step_of_directory("step-00000001/shards"), -1);
    ck_assert_int_eq(step_of_directory("step-9999999999999999999999"), -1);
    ck_assert_int_eq(step_of_directory(""), -1);
    ck_assert_int_eq(step_of_directory("///"), -1);
}
END_TEST

START_TEST(notes_are_read_strictly) {
    CheckpointPiece piece;
    uint64_t sum;
    static const char good[] = "xxh3=00000000000000ff shape=64,32 first=0,16 count=64,16 flat=5,7 array=param/x y";
    ck_assert(piece_from_note(good, &piece, &sum));
    ck_assert(sum == 255 && piece.dims == 2 && piece.shape[1] == 32 && piece.first[1] == 16 && piece.flat_count == 7);
    ck_assert_str_eq(piece.name, "param/x y");
    static const char *const bad[] = {
        "",
        "xxh3=00000000000000fg shape=4 first=0 count=4 flat=0,4 array=x",
        "xxh3=00000000000000ff shape=4 first=0 count=4 flat=0,4 array=",
        "xxh3=00000000000000ff shape=4 first=0 count=4 flat=0,5 array=x",
        "xxh3=00000000000000ff shape=4 first=1 count=4 flat=0,4 array=x",
        "xxh3=00000000000000ff shape=4 first=0 count=4 flat=0,0 array=x",
        "xxh3=00000000000000ff shape=4,4 first=0 count=4,4 flat=0,4 array=x",
        "xxh3=00000000000000ff shape=4,4,4 first=0,0,0 count=4,4,4 flat=0,4 array=x",
        "xxh3=00000000000000ff shape=0 first=0 count=0 flat=0,0 array=x",
        "xxh3=00000000000000ff shape=-4 first=0 count=4 flat=0,4 array=x",
        "xxh3=00000000000000ff shape=99999999999999999999 first=0 count=4 flat=0,4 array=x",
        "xxh3=00000000000000ff shape=4294967296,4294967296 first=0,0 count=1,1 flat=0,1 array=x",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ck_assert_msg(!piece_from_note(bad[i], &piece, &sum), "%s", bad[i]);
    }
}
END_TEST

static char header_of(const char *json, int64_t file_bytes, Error *err) {
    const int64_t n = (int64_t)strlen(json);
    char *header = xcalloc(1, (uint64_t)n + 9);
    memcpy(header + 8, json, (size_t)n);
    header[0] = (char)n;
    Safetensors file;
    const int rc = safetensors_parse("f", header, n + 8, file_bytes, &file, err);
    char result = rc == 0 ? (char)('0' + file.n) : '-';
    if (rc == 0) safetensors_free(&file);
    free(header);
    return result;
}

START_TEST(headers_of_safetensors) {
    static const struct {
        const char *json;
        int64_t data_bytes;
        char entries;
    } cases[] = {
        {"{}", 0, '0'},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}  ", 24, '1'},
        {"{\"a\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[4,12]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],"
         "\"data_offsets\":[0,4]}}",
         12, '2'},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[0,0]},\"b\":{\"dtype\":\"U8\",\"shape\":[1],"
         "\"data_offsets\":[0,1]}}",
         1, '2'},
        {" {}", 0, '-'},
        {"[]", 0, '-'},
        {"{\"a\":1}", 0, '-'},
        {"{\"__metadata__\":[]}", 0, '-'},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}", 25, '-'},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,20]}}", 20, '-'},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]}}", 28, '-'},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, '-'},
        {"{\"a\":{\"dtype\":\"X8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, '-'},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, '-'},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}}", 0, '-'},
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, '-'},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],"
         "\"data_offsets\":[0,1]}}",
         1, '-'},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Error err = {0};
        const char found = header_of(cases[i].json, 8 + (int64_t)strlen(cases[i].json) + cases[i].data_bytes, &err);
        ck_assert_msg(found == cases[i].entries, "%s: %c, not %c: %s", cases[i].json, found, cases[i].entries,
                      err.message);
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("checkpoint");
    TCase *tests = tcase_create("checkpoint");
    tcase_set_timeout(tests, getenv("TRIDENT_LONG") ? 1200 : 120);
    tcase_add_checked_fixture(tests, scratch_make, scratch_remove);
    tcase_add_test(tests, any_partition_reads_any_other);
    tcase_add_test(tests, large_arrays);
    tcase_add_test(tests, state_comes_back);
    tcase_add_test(tests, the_same_state_gives_the_same_bytes);
    tcase_add_test(tests, every_flipped_bit_is_noticed);
    tcase_add_test(tests, every_truncation_is_noticed);
    tcase_add_test(tests, exchanged_files_are_noticed);
    tcase_add_test(tests, only_what_is_needed_is_read);
    tcase_add_test(tests, contradictions_are_noticed);
    tcase_add_test(tests, other_arrays_than_saved);
    tcase_add_test(tests, incomplete_partitions_are_not_published);
    tcase_add_test(tests, keep);
    tcase_add_test(tests, leftovers_go_and_strangers_stay);
    tcase_add_test(tests, the_newest_complete_one_is_found);
    tcase_add_test(tests, saving_a_step_again);
    tcase_add_test(tests, names_of_directories);
    tcase_add_test(tests, notes_are_read_strictly);
    tcase_add_test(tests, headers_of_safetensors);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
