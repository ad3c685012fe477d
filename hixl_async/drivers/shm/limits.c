#include "limits.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "procfs.h"

enum { PATH_BYTES = 4096, FILE_BYTES = 1 << 16 };
static const uint64_t UNKNOWN = UINT64_MAX;

/* The files that a version of cgroups has for one folder. */
typedef struct version {
    const char *type;                  /* of the file system */
    const char *limit, *usage;
    const char *swap_limit, *swap_usage;
    int swap_includes_memory;
    const char *active, *inactive;     /* in memory.stat: cached files, which the kernel gives up when memory is wanted */
} version;

static const version VERSIONS[] = {
    {"cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes",
     1, "total_active_file ", "total_inactive_file "},
    {"cgroup2", "memory.max", "memory.current", "memory.swap.max", "memory.swap.current", 0, "active_file ", "inactive_file "},
};

static uint64_t number_at(const char *text, uint64_t unit) {
    if (text == NULL) return UNKNOWN;
    char *end;
    const unsigned long long value = strtoull(text, &end, 10);
    return end == text || value > UINT64_MAX / unit ? UNKNOWN : (uint64_t)value * unit;      /* "max" is no number */
}

static uint64_t plus(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

static uint64_t minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

static uint64_t known(uint64_t value) { return value == UNKNOWN ? 0 : value; }

/* The text is the caller's space, because files are read one after the other. */
static int read_in(const char *folder, const char *name, char *text) {
    char path[PATH_BYTES];
    int error;
    return snprintf(path, sizeof path, "%s/%s", folder, name) < PATH_BYTES && shm_file_read(path, text, FILE_BYTES, &error);
}

static uint64_t file_number(const char *folder, const char *name, char *text) {
    return read_in(folder, name, text) ? number_at(text, 1) : UNKNOWN;
}

/* How much the machine could swap out; *free is what it has without that. */
static uint64_t machine(const char *root, char *text, uint64_t *free) {
    *free = UNKNOWN;
    if (!read_in(root, "proc/meminfo", text)) return 0;
    *free = number_at(shm_line_find(text, "MemAvailable:"), 1024);
    return known(number_at(shm_line_find(text, "SwapFree:"), 1024));
}

/* Lower *room to what one cgroup leaves, if that is less.  The numbers of a limit that is not set are huge. */
static void look_at(const version *files, const char *folder, uint64_t swap_free, char *text, shm_room *room) {
    const uint64_t limit = file_number(folder, files->limit, text);
    if (limit == UNKNOWN || limit >= INT64_MAX / 2) return;
    const uint64_t usage = known(file_number(folder, files->usage, text));
    const uint64_t swap_limit = file_number(folder, files->swap_limit, text);
    const uint64_t swap_usage = known(file_number(folder, files->swap_usage, text));
    uint64_t cached = 0, swap = minus(swap_limit, swap_usage);
    if (files->swap_includes_memory) swap = swap_limit == UNKNOWN ? swap_free : minus(swap, minus(limit, usage));
    if (swap > swap_free) swap = swap_free;
    if (read_in(folder, "memory.stat", text))
        cached = known(number_at(shm_line_find(text, files->active), 1)) + known(number_at(shm_line_find(text, files->inactive), 1));
    const uint64_t left = plus(minus(limit, minus(usage, cached)), swap);
    if (left >= room->left) return;
    room->left = left;
    room->limit = limit;
    if (snprintf(room->source, sizeof room->source, "%s/%s", folder, files->limit) < 0) room->source[0] = '\0';
}

/* The path of this process in a hierarchy, from /proc/self/cgroup: lines of "number:controllers:path". */
static int own_path(const char *text, int unified, char *path, size_t size) {
    for (const char *line = text; line != NULL && *line != '\0'; line = strchr(line, '\n'), line += line != NULL) {
        const char *controllers = strchr(line, ':'), *at = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        const char *end = strchrnul(line, '\n');
        if (at == NULL || at > end) continue;
        const size_t listed = (size_t)(at - controllers - 1);
        const char *memory = (const char *)memmem(controllers + 1, listed, "memory", 6);
        if (unified ? listed != 0 : memory == NULL) continue;
        snprintf(path, size, "%.*s", (int)(end - at - 1), at + 1);
        return 1;
    }
    return 0;
}

/* All cgroups from our own up to the root of a mounted hierarchy: each may have a limit. */
static void climb(const char *root, const version *files, const char *top, const char *mounted, char *path, uint64_t swap_free,
                  char *text, shm_room *room) {
    /* The mount may show only a part of the hierarchy, such as the container's own. */
    const size_t skipped = strcmp(top, "/") == 0 ? 0 : strlen(top);
    char *at = strncmp(path, top, skipped) == 0 ? path + skipped : path + strlen(path);
    for (;;) {
        char folder[PATH_BYTES];
        if (snprintf(folder, sizeof folder, "%s%s%s", root, mounted, strcmp(at, "/") == 0 ? "" : at) < PATH_BYTES)
            look_at(files, folder, swap_free, text, room);
        char *last = strrchr(at, '/');
        if (last == NULL) return;
        *last = '\0';
    }
}

static void look_at_cgroups(const char *root, uint64_t swap_free, char *text, shm_room *room) {
    static const char FORMAT[] = "%*s %*s %*s %4095s %4095s";        /* id, parent, device, root, mount point */
    char path[PATH_BYTES];
    char *mine = (char *)malloc(FILE_BYTES), *mounts = (char *)malloc(FILE_BYTES);
    if (mine != NULL && mounts != NULL && read_in(root, "proc/self/cgroup", mine) && read_in(root, "proc/self/mountinfo", mounts)) {
        char *rest = mounts;
        for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
            char top[PATH_BYTES], mounted[PATH_BYTES], type[16], *about = strstr(line, " - ");
            if (about == NULL || sscanf(about, " - %15s", type) != 1 || sscanf(line, FORMAT, top, mounted) != 2) continue;
            for (size_t i = 0; i < sizeof VERSIONS / sizeof *VERSIONS; i++)
                if (strcmp(type, VERSIONS[i].type) == 0 && (i == 1 || strstr(about, "memory") != NULL)
                    && own_path(mine, i == 1, path, sizeof path))
                    climb(root, &VERSIONS[i], top, mounted, path, swap_free, text, room);
        }
    }
    free(mounts);
    free(mine);
}

shm_room shm_memory_room(const char *root) {
    shm_room room = {.left = UNKNOWN, .limit = UNKNOWN};
    char *text = (char *)malloc(FILE_BYTES);
    if (text == NULL) return room;
    uint64_t free_bytes;
    const uint64_t swap_free = machine(root, text, &free_bytes);
    if (free_bytes != UNKNOWN) {
        room.left = plus(free_bytes, swap_free);
        snprintf(room.source, sizeof room.source, "/proc/meminfo");
    }
    look_at_cgroups(root, swap_free, text, &room);
    free(text);
    return room;
}

/* ---- texts ----------------------------------------------------------------------------------------------------------- */

static int describe_resource(int resource, const char *name, const char *what, const char *flag, char *text, size_t size) {
    struct rlimit limit;
    if (getrlimit(resource, &limit) != 0) return 0;
    char hard[32] = "any number";
    if (limit.rlim_max != RLIM_INFINITY) snprintf(hard, sizeof hard, "%" PRIu64, (uint64_t)limit.rlim_max);
    if (limit.rlim_cur == RLIM_INFINITY) return 0;
    return snprintf(text, size, "%s is %" PRIu64 " %s; `ulimit %s NUMBER` sets it, up to %s without privileges", name,
                    (uint64_t)limit.rlim_cur, what, flag, hard);
}

static int describe_memory(const char *root, char *text, size_t size) {
    const shm_room room = shm_memory_room(root);
    if (room.left == UNKNOWN) return snprintf(text, size, "how much memory is left cannot be found out, because /proc is missing");
    int used = 0;
    if (room.limit == UNKNOWN) {
        used = snprintf(text, size, "%" PRIu64 " MiB of this machine are left, swap included (%s)", room.left >> 20, room.source);
    } else {
        used = snprintf(text, size, "%" PRIu64 " MiB are left of the %" PRIu64 " MiB that the container may use (%s); `docker "
                        "run --memory` or Kubernetes' resources.limits.memory sets more", room.left >> 20, room.limit >> 20,
                        room.source);
    }
    if (used > 0 && (size_t)used + 2 < size) {
        memcpy(text + used, "; ", 3);
        const int more = describe_resource(RLIMIT_AS, "RLIMIT_AS", "bytes of address space", "-v", text + used + 2,
                                           size - (size_t)used - 2);
        if (more > 0) return used + 2 + more;
        text[used] = '\0';
    }
    return used;
}

int shm_limit_describe(const char *root, int error, char *text, size_t size) {
    switch (error) {
    case EMFILE: return describe_resource(RLIMIT_NOFILE, "RLIMIT_NOFILE", "open files of this process", "-n", text, size);
    case ENFILE: return snprintf(text, size, "the machine has no more open files; `sysctl fs.file-max=NUMBER` sets their limit");
    case EAGAIN: return describe_resource(RLIMIT_NPROC, "RLIMIT_NPROC", "processes and threads of this user", "-u", text, size);
    case ENOMEM: case ENOSPC: return describe_memory(root, text, size);
    default: return 0;
    }
}
