/* test_checkpoint_faults.c - saving while the file system fails, the process dies, or the power goes, at every
 * single call: at every moment there is a complete checkpoint, the old or the new one, with the right bits. */
#include "tests/unit/train/checkpoint_world.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>

/* In place of libc's functions, for the whole of this program. */
#include "tests/faults/faulty_io.c"

enum { OLD_STEP = 5 };

static int faulty_rank;

static void count_one_rank(int rank) { faulty_io_thread(rank == faulty_rank); }

typedef struct {
    char *dir;
    Logical old, new;
    Partition *old_partition, *new_partition;
    int ranks;
    int64_t new_step; /* OLD_STEP: the step is saved again, with other values */
} Scene;

static Scene scene_make(const char *name, int ranks, int64_t new_step) {
    Scene s = {.dir = xstrdup(scratch(name)),
               .old = logical_fixed(1),
               .new = logical_fixed(2),
               .ranks = ranks,
               .new_step = new_step};
    s.old_partition = partition_rows(&s.old, ranks);
    s.new_partition = partition_rows(&s.new, ranks);
    for (int i = 0; i < s.new_partition->n; i++) piece_fill(&s.new, &s.new_partition->list[i]);
    return s;
}

static void scene_free(Scene *s) {
    free(s->dir);
    partition_free(s->old_partition);
    partition_free(s->new_partition);
}

static void remove_tree(const char *dir) {
    char *command = xasprintf("rm -rf '%s'", dir);
    ck_assert_int_eq(system(command), 0);
    free(command);
}

/* A directory with the old checkpoint alone. */
static void scene_reset(const Scene *s) {
    remove_tree(s->dir);
    save_good(s->dir, OLD_STEP, 1, &s->old, s->old_partition, s->ranks);
}

static int save_new(const Scene *s, Error *err) {
    SaveJob job = {
        .dir = s->dir, .step = s->new_step, .keep = 1, .partition = s->new_partition, .begin = count_one_rank};
    const int rc = save_all(&job, s->ranks);
    *err = job.err[0];
    return rc;
}

/* Files and directories below dir. */
static int count_files(const char *dir) {
    DIR *listing = opendir(dir);
    int n = 0;
    if (!listing) return 0;
    for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        char *path = xasprintf("%s/%s", dir, entry->d_name);
        n += 1 + count_files(path);
        free(path);
    }
    closedir(listing);
    return n;
}

static bool holds_old(const Scene *s) { return holds(s->dir, OLD_STEP, &s->old); }
static bool holds_new(const Scene *s) { return holds(s->dir, s->new_step, &s->new); }
static bool holds_one(const Scene *s) { return holds_old(s) || holds_new(s); }

/* After whatever happened, the next save must work, and nothing else be left. */
static void next_save_cleans_up(const Scene *s, long at) {
    Error err;
    faulty_io_set(&(FaultyIo){0});
    ck_assert_msg(save_new(s, &err) == 0, "the save after call %ld: %s", at, err.message);
    ck_assert(holds_new(s));
    ck_assert_msg(count_files(s->dir) == 2 + s->ranks, "%d files after call %ld", count_files(s->dir), at);
}

/* The k-th call fails, for all k. Returns how many calls there are. */
static long fail_each_call(const Scene *s, int error, bool sticky) {
    for (long at = 1;; at++) {
        scene_reset(s);
        Error err;
        faulty_io_set(&(FaultyIo){.below = s->dir, .at = at, .error = error, .sticky = sticky});
        const int rc = save_new(s, &err);
        const long calls = faulty_io_calls();
        faulty_io_set(&(FaultyIo){0});
        if (rc == 0) {
            ck_assert_msg(holds_new(s), "call %ld of rank %d", at, faulty_rank);
        } else {
            ck_assert_msg(holds_one(s), "call %ld of rank %d: %s", at, faulty_rank, err.message);
            ck_assert_int_eq(err.status, EXIT_CHECKPOINT);
            ck_assert_msg(strstr(err.message, strerror(error)) && strstr(err.message, s->dir), "call %ld: %s", at,
                          err.message);
            char *name = xasprintf("rank %d: ", faulty_rank);
            if (s->ranks > 1) ck_assert_contains(err.message, name);
            free(name);
            /* Unless nothing can be removed any more, only what is complete is left, or what may become so again:
             * a manifest whose rename did not reach the disk for certain leaves the old files and the new ones. */
            const int limit = (holds_new(s) ? 2 : 1) * (2 + s->ranks);
            if (!sticky) ck_assert_msg(count_files(s->dir) <= limit, "call %ld left %d files", at, count_files(s->dir));
        }
        next_save_cleans_up(s, at);
        if (calls < at) return at - 1;
    }
}

static void for_every_rank(const char *name, void (*body)(const Scene *s, void *context), void *context) {
    static const int64_t steps[] = {OLD_STEP + 1, OLD_STEP};
    for (int ranks = 1; ranks <= 3; ranks += 2) {
        for (int i = 0; i < 2; i++) {
            Scene s = scene_make(name, ranks, steps[i]);
            for (faulty_rank = 0; faulty_rank < ranks; faulty_rank += 2) body(&s, context);
            scene_free(&s);
        }
    }
}

static void fail_with(const Scene *s, void *context) {
    const int error = *(int *)context;
    const long once = fail_each_call(s, error, false), on = fail_each_call(s, error, true);
    /* A rank that only writes its shard: open, write, fsync, close; rank 0 also publishes and removes. */
    ck_assert_msg(once >= (faulty_rank ? 4 : 15) && on >= 1, "%ld calls", once);
}

START_TEST(every_call_fails_once_or_from_then_on) {
    static int errors[] = {ENOSPC, EIO, EROFS};
    for_every_rank("fail", fail_with, &errors[_i]);
}
END_TEST

/* The process is killed at the k-th call, for all k. */
static void kill_at_each_call(const Scene *s, void *context) {
    (void)context;
    for (long at = 1;; at++) {
        scene_reset(s);
        fflush(NULL);
        const pid_t child = fork();
        ck_assert_int_ge(child, 0);
        if (child == 0) {
            Error err;
            faulty_io_set(&(FaultyIo){.below = s->dir, .at = at});
            _exit(save_new(s, &err) == 0 ? 0 : 1);
        }
        int status;
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert_msg(holds_one(s), "killed at call %ld of rank %d", at, faulty_rank);
        next_save_cleans_up(s, at);
        if (WIFEXITED(status)) {
            ck_assert_int_eq(WEXITSTATUS(status), 0);
            ck_assert_int_ge(at, faulty_rank ? 5 : 16);
            return;
        }
        ck_assert_int_eq(WTERMSIG(status), SIGKILL);
    }
}

START_TEST(killed_at_every_call) { for_every_rank("kill", kill_at_each_call, NULL); }
END_TEST

/* Writes that take a part, calls that are interrupted: nobody sees them. */
START_TEST(short_writes_and_interruptions_are_invisible) {
    static const int limits[] = {1, 7, 4096};
    for (int i = 0; i < 3; i++) {
        Scene s = scene_make("short", 3, OLD_STEP + 1);
        scene_reset(&s);
        for (faulty_rank = 0; faulty_rank < 3; faulty_rank++) {
            Error err;
            faulty_io_set(&(FaultyIo){.below = s.dir, .short_writes = limits[i]});
            ck_assert_msg(save_new(&s, &err) == 0, "%s", err.message);
            faulty_io_set(&(FaultyIo){0});
            ck_assert(holds_new(&s));
        }
        scene_free(&s);
    }
}
END_TEST

/* A disk with room for ever more bytes, until the save fits. */
START_TEST(a_disk_that_fills_up) {
    Scene s = scene_make("full", 1, OLD_STEP + 1);
    faulty_rank = 0;
    int failed = 0;
    for (long long room = 1;; room += 1 + room / 4) {
        scene_reset(&s);
        Error err;
        faulty_io_set(&(FaultyIo){.below = s.dir, .capacity = room});
        const int rc = save_new(&s, &err);
        faulty_io_set(&(FaultyIo){0});
        if (rc == 0) break;
        failed++;
        ck_assert(holds_old(&s));
        ck_assert_contains(err.message, "No space left on device");
        ck_assert_int_eq(count_files(s.dir), 3);
        next_save_cleans_up(&s, (long)room);
    }
    ck_assert_int_gt(failed, 10);
    scene_free(&s);
}
END_TEST

START_TEST(directories_that_may_not_be_written) {
    if (geteuid() == 0) return; /* root may do everything */
    Scene s = scene_make("denied", 3, OLD_STEP + 1);
    scene_reset(&s);
    Error err;
    ck_assert_int_eq(chmod(s.dir, 0555), 0);
    ck_assert_int_eq(save_new(&s, &err), -1);
    ck_assert_int_eq(chmod(s.dir, 0777), 0);
    ck_assert_contains(err.message, "Permission denied");
    ck_assert(holds_old(&s));
    scene_free(&s);
}
END_TEST

/* ---- the power goes ----
 *
 * What POSIX promises of a file: the content at its last fsync; of a directory: the names at its last fsync. What
 * was done since may be there after the power came back, or not, each file and each name for itself. The shadow
 * below holds the promised state; a crash draws one of the states that are possible. */

enum { FILES_MAX = 64, NAMES_MAX = 64 };

typedef struct {
    ino_t inode;
    char *bytes; /* at the last fsync; NULL: never */
    size_t n;
} ShadowFile;

typedef struct {
    char *dir, *name; /* a promised name */
    ino_t inode;      /* of a file; 0: a directory */
} ShadowName;

static struct {
    ShadowFile files[FILES_MAX];
    int n_files;
    ShadowName names[NAMES_MAX];
    int n_names;
} shadow;

static ShadowFile *shadow_file(ino_t inode) {
    for (int i = 0; i < shadow.n_files; i++) {
        if (shadow.files[i].inode == inode) return &shadow.files[i];
    }
    ck_assert_int_lt(shadow.n_files, FILES_MAX);
    shadow.files[shadow.n_files] = (ShadowFile){.inode = inode};
    return &shadow.files[shadow.n_files++];
}

static void shadow_forget_names(const char *dir) {
    int kept = 0;
    for (int i = 0; i < shadow.n_names; i++) {
        if (strcmp(shadow.names[i].dir, dir) == 0) {
            free(shadow.names[i].dir);
            free(shadow.names[i].name);
        } else {
            shadow.names[kept++] = shadow.names[i];
        }
    }
    shadow.n_names = kept;
}

static void shadow_sync_directory(const char *dir) {
    shadow_forget_names(dir);
    DIR *listing = opendir(dir);
    ck_assert_ptr_nonnull(listing);
    for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        ck_assert_int_lt(shadow.n_names, NAMES_MAX);
        shadow.names[shadow.n_names++] = (ShadowName){xstrdup(dir), xstrdup(entry->d_name),
                                                      entry->d_type == DT_DIR ? 0 : entry->d_ino};
    }
    closedir(listing);
}

static void shadow_sync_file(const char *path) {
    struct stat facts;
    ck_assert_int_eq(stat(path, &facts), 0);
    ShadowFile *file = shadow_file(facts.st_ino);
    free(file->bytes);
    file->bytes = slurp(path, &file->n);
}

static void shadow_after(const char *call, const char *path) {
    struct stat facts;
    if (strcmp(call, "fsync") != 0 || stat(path, &facts) != 0) return;
    if (S_ISDIR(facts.st_mode)) shadow_sync_directory(path);
    else shadow_sync_file(path);
}

static void shadow_clear(void) {
    for (int i = 0; i < shadow.n_files; i++) free(shadow.files[i].bytes);
    for (int i = 0; i < shadow.n_names; i++) {
        free(shadow.names[i].dir);
        free(shadow.names[i].name);
    }
    memset(&shadow, 0, sizeof shadow);
}

/* All that is there now is safe. */
static void shadow_begin(const char *dir) {
    shadow_sync_directory(dir);
    for (int i = 0; i < shadow.n_names; i++) {
        char *path = xasprintf("%s/%s", shadow.names[i].dir, shadow.names[i].name);
        if (shadow.names[i].inode == 0) shadow_sync_directory(path);
        else shadow_sync_file(path);
        free(path);
    }
}

static const ShadowName *promised(const char *dir, const char *name) {
    for (int i = 0; i < shadow.n_names; i++) {
        if (strcmp(shadow.names[i].dir, dir) == 0 && strcmp(shadow.names[i].name, name) == 0) return &shadow.names[i];
    }
    return NULL;
}

/* Writes what the inode holds after the crash: what was promised, what is there now, or a part of that. */
static void restore_file(const char *to, ino_t inode, const char *now) {
    const ShadowFile *file = shadow_file(inode);
    size_t n = 0;
    char *bytes = now ? slurp(now, &n) : NULL;
    const bool promise = !bytes || (file->bytes && draw(2));
    if (!promise && !file->bytes) n = (size_t)draw((int64_t)n + 1);
    FILE *out = fopen(to, "wb");
    ck_assert_ptr_nonnull(out);
    if (promise) fwrite(file->bytes, 1, file->n, out);
    else fwrite(bytes, 1, n, out);
    ck_assert_int_eq(fclose(out), 0);
    free(bytes);
}

static void crash_directory(const char *from, const char *to);

/* One name after the crash: as promised, or as it is now (there is NULL: not at all). */
static void crash_name(const char *from, const char *to, const char *name, const struct stat *now) {
    const ShadowName *before = promised(from, name);
    char *path = xasprintf("%s/%s", from, name), *copy = xasprintf("%s/%s", to, name);
    const bool take_now = now && (!before || draw(2));
    const bool take_before = before && !take_now && (now || draw(2));
    /* A name that appeared since may be lost; one that vanished since may be back. */
    if (take_now && (before || draw(2))) {
        if (S_ISDIR(now->st_mode)) crash_directory(path, copy);
        else restore_file(copy, now->st_ino, path);
    } else if (take_before) {
        if (before->inode == 0) crash_directory(path, copy);
        else restore_file(copy, before->inode, now && now->st_ino == before->inode ? path : NULL);
    }
    free(path);
    free(copy);
}

static void crash_directory(const char *from, const char *to) {
    ck_assert_int_eq(mkdir(to, 0777), 0);
    DIR *listing = opendir(from);
    if (listing) {
        for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
            struct stat facts;
            char *path = xasprintf("%s/%s", from, entry->d_name);
            if (entry->d_name[0] != '.' && stat(path, &facts) == 0) crash_name(from, to, entry->d_name, &facts);
            free(path);
        }
        closedir(listing);
    }
    for (int i = 0; i < shadow.n_names; i++) {
        struct stat facts;
        char *path = xasprintf("%s/%s", from, shadow.names[i].name);
        if (strcmp(shadow.names[i].dir, from) == 0 && stat(path, &facts) != 0) {
            crash_name(from, to, shadow.names[i].name, NULL);
        }
        free(path);
    }
}

static long crash_at;
static const Scene *crash_scene;
static char *crash_dir;

/* After the crash_at-th call, and several times, since there are many ways to lose power: what is there then? */
static void maybe_crash(const char *call, const char *path) {
    shadow_after(call, path);
    if (faulty_io_calls() != crash_at) return;
    faulty_io_thread(false);
    for (int i = 0; i < 8; i++) {
        remove_tree(crash_dir);
        crash_directory(crash_scene->dir, crash_dir);
        const bool good = holds(crash_dir, OLD_STEP, &crash_scene->old) ||
                          holds(crash_dir, crash_scene->new_step, &crash_scene->new);
        ck_assert_msg(good, "power lost after call %ld, %s of %s " SEED_FORMAT, crash_at, call, path, SEED_VALUE);
    }
    faulty_io_thread(true);
}

START_TEST(power_lost_after_every_call) {
    static const int64_t steps[] = {OLD_STEP + 1, OLD_STEP};
    seed_begin();
    const int rounds = getenv("TRIDENT_LONG") ? 50 : 2;
    for (int round = 0; round < rounds * 2; round++) {
        Scene s = scene_make("power", 1, steps[round % 2]);
        crash_dir = xstrdup(scratch("crashed"));
        crash_scene = &s;
        faulty_rank = 0;
        long calls = 0;
        for (crash_at = 1; crash_at == 1 || crash_at <= calls; crash_at++) {
            Error err;
            scene_reset(&s);
            shadow_begin(s.dir);
            faulty_io_set(&(FaultyIo){.below = s.dir, .after = maybe_crash});
            ck_assert_msg(save_new(&s, &err) == 0, "%s", err.message);
            calls = faulty_io_calls();
            faulty_io_set(&(FaultyIo){0});
            shadow_clear();
        }
        ck_assert_int_ge(calls, 12);
        free(crash_dir);
        scene_free(&s);
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("checkpoint faults");
    TCase *tests = tcase_create("faults");
    tcase_set_timeout(tests, getenv("TRIDENT_LONG") ? 1200 : 180);
    tcase_add_checked_fixture(tests, scratch_make, scratch_remove);
    tcase_add_loop_test(tests, every_call_fails_once_or_from_then_on, 0, 3);
    tcase_add_test(tests, killed_at_every_call);
    tcase_add_test(tests, short_writes_and_interruptions_are_invisible);
    tcase_add_test(tests, a_disk_that_fills_up);
    tcase_add_test(tests, directories_that_may_not_be_written);
    tcase_add_test(tests, power_lost_after_every_call);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
