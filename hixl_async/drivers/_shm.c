/* The shared-memory driver: peers on one Linux host.
 *
 * The initiator of a transfer does all the work: it maps the peer's region and copies, inline or on copy threads.  A peer
 * needs no thread for it and can be stopped or killed at any point.
 *
 * Two kinds of threads run here: the loop (the thread of T2) and the copy threads.  The parts, each knowing only those above:
 *
 *   shm/procfs limits descriptor segment    the kernel's files and limits; descriptors; memfd segments
 *   shm/half ring doorbell                  what the two sides share; notification records; the pipe that wakes
 *   shm/process                             the peer's process, and process_vm_*
 *   shm/job pool instance                   accepted ops, and how the loop hands them to threads
 *   shm/link op region                      a link, an op and a memory, as all others see them
 *   shm/copy notes                          moving bytes; appending notifications
 *   shm/workers                             copy threads
 *   shm/submit memory                       transfers; regions of ours and imports of a peer's
 *   shm/connect fence stop receive          the life of a link
 *
 * Options (strings of whole numbers):
 *   threads         copy threads, started when first needed                  1..64, default 2; 1 below four CPUs
 *   inline_bytes    batches up to this are copied inside submit              default 1310720
 *   chunk_bytes     what a copy thread copies between two looks at fences    4096.., default 1048576
 *   stream_bytes    batches from this on are copied past the caches          default 3/4 of the third level
 *   ring_bytes      notification ring per link; a power of two               4096..67108864, default 262144
 *   pending_notes   notifications per link that may wait for room            default 1024
 *   nowait          0: read doorbells as on kernels before 6.4               default: what the kernel can
 */
#include "hxa_module.h"
#include "shm/connect.h"
#include "shm/descriptor.h"
#include "shm/doorbell.h"
#include "shm/fence.h"
#include "shm/limits.h"
#include "shm/link.h"
#include "shm/memory.h"
#include "shm/receive.h"
#include "shm/region.h"
#include "shm/stop.h"
#include "shm/submit.h"
#include "shm/workers.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

_Static_assert(sizeof(void *) == 8, "offsets and addresses share 64-bit words");

/* ---- options --------------------------------------------------------------------------------------------------------- */

typedef struct setting { const char *key; uint64_t least, most, value; } setting;

static uint64_t cpus(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? (uint64_t)CPU_COUNT(&set) : 2;
}

static uint64_t stream_from(void) {
    long cache = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return (cache > 0 ? (uint64_t)cache : 32u << 20) / 4 * 3;
}

static int parse(const hxa_option *option, setting *settings, size_t n, char *error, size_t error_len) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(option->key, settings[i].key) != 0) continue;
        const char *text = option->value;
        if (settings[i].least == 0 && settings[i].most == 1) {      /* a truth value */
            if (strcmp(text, "true") == 0) text = "1";
            else if (strcmp(text, "false") == 0) text = "0";
        }
        char *end;
        errno = 0;
        const unsigned long long value = strtoull(text, &end, 10);
        if (errno == 0 && end != text && *end == '\0' && text[0] != '-' && value >= settings[i].least
            && value <= settings[i].most) {
            settings[i].value = value;
            return 0;
        }
        snprintf(error, error_len, "shm: %s=%s is not a whole number from %llu to %llu", option->key, option->value,
                 (unsigned long long)settings[i].least, (unsigned long long)settings[i].most);
        return -HXA_E_INVALID;
    }
    int used = snprintf(error, error_len, "shm: no option %s; there are", option->key);
    for (size_t i = 0; i < n && used >= 0 && (size_t)used < error_len; i++)
        used += snprintf(error + used, error_len - (size_t)used, i ? ", %s" : " %s", settings[i].key);
    return -HXA_E_INVALID;
}

/* ---- life ------------------------------------------------------------------------------------------------------------ */

static int shm_open_instance(const hxa_option *options, size_t n, const hxa_sink *sink, hxa_instance **made, char *error,
                             size_t error_len) {
    enum { THREADS, INLINE, CHUNK, STREAM, RING, PENDING, NOWAIT, SETTINGS };
    const uint64_t cores = cpus();
    setting settings[SETTINGS] = {
        [THREADS] = {"threads", 1, SHM_THREADS_MAX, cores < 4 ? 1 : 2},
        [INLINE] = {"inline_bytes", 0, 1u << 30, 1280 << 10},
        [CHUNK] = {"chunk_bytes", SHM_PAGE, 1u << 30, 1 << 20},
        [STREAM] = {"stream_bytes", 0, UINT64_MAX, stream_from()},
        [RING] = {"ring_bytes", SHM_PAGE, SHM_RING_MAX, 256 << 10},
        [PENDING] = {"pending_notes", 1, 1u << 30, 1024},
        [NOWAIT] = {"nowait", 0, 1, 1},
    };
    for (size_t i = 0; i < n; i++) {
        const int status = parse(&options[i], settings, SETTINGS, error, error_len);
        if (status != 0) return status;
    }
    if (settings[RING].value & (settings[RING].value - 1)) {
        snprintf(error, error_len, "shm: ring_bytes=%llu is not a power of two", (unsigned long long)settings[RING].value);
        return -HXA_E_INVALID;
    }
    hxa_instance *self = (hxa_instance *)calloc(1, sizeof *self);
    const uint64_t note_bytes = settings[RING].value / 4 - 16;
    uint8_t *text = (uint8_t *)malloc(note_bytes);
    if (self == NULL || text == NULL || shm_pool_open(&self->pool, (uint32_t)settings[THREADS].value) != 0) {
        free(text);
        free(self);
        snprintf(error, error_len, "shm: out of memory");
        return -HXA_E_NOMEM;
    }
    self->sink = *sink;
    self->inline_bytes = settings[INLINE].value;
    self->chunk_bytes = settings[CHUNK].value;
    self->stream_bytes = settings[STREAM].value;
    self->capacity = (uint32_t)settings[RING].value;
    self->waiting_limit = (uint32_t)settings[PENDING].value;
    self->nowait = settings[NOWAIT].value != 0 && shm_bell_nowait();
    self->note_bytes = note_bytes;
    self->text = text;
    *made = self;
    return 0;
}

static void shm_close_instance(hxa_instance *self) {
    shm_pool_close(&self->pool);
    free(self->text);
    free(self);
}

/* In the child.  Imported mappings did not come along (MADV_DONTFORK), the threads neither. */
static void shm_after_fork(hxa_instance *self) {
    for (hxa_link *link = self->links; link != NULL; link = link->next) {
        const int fds[] = {link->bell, link->bell_read, link->peer_bell, link->process.pidfd};
        for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) shm_fd_close(fds[i]);
    }
    for (hxa_mem *mem = self->memories; mem != NULL; mem = mem->next) shm_fd_close(mem->fd);
}

static void shm_limits(hxa_instance *self, hxa_limits *out) {
    *out = (hxa_limits){
        .descriptors = SHM_DESCRIPTORS, .note_bytes = self->note_bytes, .inline_bytes = self->inline_bytes, .alignment = 1};
}

static void shm_stats(hxa_instance *self, hxa_stats *out) {
    uint64_t *to = (uint64_t *)(void *)out;
    const uint64_t *loop = (const uint64_t *)(const void *)&self->loop;
    const uint64_t *others = (const uint64_t *)(const void *)&self->others;
    for (size_t i = 0; i < sizeof *out / sizeof *to; i++) to[i] = shm_load(&loop[i]) + shm_load(&others[i]);
}

/* ---- texts ----------------------------------------------------------------------------------------------------------- */

/* The name of an errno, and what it means.  strerror_r comes in two kinds. */
static void describe(int error, char *text, size_t size) {
    char space[96];
    const char *name = NULL;
#ifdef __GLIBC__
    const char *meaning = strerror_r(error, space, sizeof space);
#if __GLIBC_PREREQ(2, 32)
    name = strerrorname_np(error);
#endif
#else
    const char *meaning = strerror_r(error, space, sizeof space) == 0 ? space : "unknown error";
#endif
    if (name != NULL) snprintf(text, size, "%s: %s", name, meaning);
    else snprintf(text, size, "errno %d: %s", error, meaning);
}

/* Why registered memory of the peer cannot be reached, and what to do instead. */
static void describe_unreachable(int error, char *text, size_t size) {
    static const char INSTEAD[] = "use a region made by allocate";
    char reason[128];
    describe(error, reason, sizeof reason);
    switch (error) {
    case ESRCH:
        snprintf(text, size, "the peer's registered memory can't be reached: its process has no number here (it is in another "
                 "pid namespace that is not below ours), has ended, or is not the one that the control connection names; %s (%s)",
                 INSTEAD, reason);
        break;
    case ENOENT: case EACCES:
        snprintf(text, size, "the peer's registered memory can't be reached, because it can't be found out whose process it is: "
                 "/proc is not mounted here, or hides other processes; mount it, or %s (%s)", INSTEAD, reason);
        break;
    default:
        snprintf(text, size, "the peer's registered memory can't be reached by process_vm_readv/writev: it is another user's "
                 "process, or not dumpable, or kernel.yama.ptrace_scope or a container's seccomp filter forbids it; %s (%s)",
                 INSTEAD, reason);
    }
}

static const char *shm_error_text(int32_t status, int32_t native) {
    static const char *const texts[] = {
        [HXA_OK] = "done",
        [HXA_E_INVALID] = "malformed argument",
        [HXA_E_RANGE] = "outside the memory, or a notification longer than the link allows",
        [HXA_E_RIGHTS] = "the memory's rights forbid it",
        [HXA_E_UNSUPPORTED] = "the shm driver cannot do that",
        [HXA_E_NOMEM] = "memory, descriptors, threads or address space ran out",
        [HXA_E_BUSY] = "too many notifications wait for the peer to read them",
        [HXA_E_LINK] = "the link is down",
        [HXA_E_CANCELLED] = "cancelled before all of it was done",
        [HXA_E_TIMEOUT] = "timed out",
        [HXA_E_PROTOCOL] = "the peer sent what no shm driver of this version sends",
        [HXA_E_SYSTEM] = "the operating system refused",
    };
    static _Thread_local char text[800];
    char reason[128], limit[600];
    if (status < 0) status = -status;
    if (status < 0 || (size_t)status >= sizeof texts / sizeof *texts) return "unknown status";
    if (native == 0) return texts[status];
    describe(native, reason, sizeof reason);
    if (status == HXA_E_RIGHTS) {
        describe_unreachable(native, text, sizeof text);
    } else if (status == HXA_E_RANGE && native == EFAULT) {
        snprintf(text, sizeof text, "an address of registered memory is not mapped any more, or read-only (%s)", reason);
    } else if (status == HXA_E_NOMEM && shm_limit_describe("", native, limit, sizeof limit) > 0) {
        snprintf(text, sizeof text, "%s; %s", reason, limit);
    } else {
        snprintf(text, sizeof text, "%s (%s)", texts[status], reason);
    }
    return text;
}

/* ---- the table ------------------------------------------------------------------------------------------------------- */

static const hxa_driver shm_driver = {
    .abi = HXA_DRIVER_ABI,
    .size = sizeof(hxa_driver),
    .name = "shm",
    .caps = HXA_CAP_LOCAL_ANY | HXA_CAP_ALLOC | HXA_CAP_REGISTER | HXA_CAP_SAME_HOST | HXA_CAP_SIGNAL | HXA_CAP_NOTIFY
            | HXA_CAP_CANCEL | HXA_CAP_FDS,
    .open = shm_open_instance,
    .close = shm_close_instance,
    .after_fork = shm_after_fork,
    .limits = shm_limits,
    .stats = shm_stats,
    .error_text = shm_error_text,
    .mem_alloc = shm_mem_alloc,
    .mem_register = shm_mem_register,
    .mem_export = shm_mem_export,
    .mem_import = shm_mem_import,
    .mem_release = shm_mem_release,
    .link_new = shm_link_new,
    .link_connect = shm_link_connect,
    .link_fd = shm_link_fd,
    .link_stop = shm_link_stop,
    .link_fence = shm_link_fence,
    .link_free = shm_link_free,
    .submit = shm_submit,
    .cancel = shm_cancel,
    .progress = shm_progress,
    .poll = shm_poll,
    .link_pace = shm_link_pace,
    .waits = shm_waits,
    .mem_borrow = shm_mem_borrow,
    .mem_return = shm_mem_return,
};

HXA_DRIVER_MODULE(_shm, shm_driver)
