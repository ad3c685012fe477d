/* The fault-injecting driver: wraps another driver's table and spoils its work by a seeded plan.
 *
 * The plan lies in a control block that hixl_async.testing owns and fills; without one nothing is spoilt.  The parts, each of
 * which uses only those above it:
 *
 *   control, ring   the block's layout; linked rings
 *   plan            the rules: which of them apply to which operation
 *   timer           the thread that rings alarms
 *   instance, link  the objects;  registry: all of them;  doorbell: makes the loop poll a link
 *   operation       one accepted operation;  steps: the submits that it is divided into;  reorder, wait: what they wait for
 *   stop, outcome   how links and operations end, and what is reported
 *   work            submit, cancel, abandon, progress
 *   call, message   calls of transports that block, whether or not the wrapped driver has them; messages between drivers
 *   link.c          links: made, polled, stopped
 *   command         releases, breaks and messages, on Python's command
 *
 * Options:
 *   driver     address of the wrapped driver's table (the core turns a capsule into it); required
 *   control    address of the control block
 *   seed       number that the plan's chances and ranges start from; default: the control block's
 *   inner.*    handed to the wrapped driver without the prefix
 */
#include "hxa_module.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "faulty/call.h"
#include "faulty/command.h"
#include "faulty/link.h"
#include "faulty/message.h"
#include "faulty/operation.h"
#include "faulty/registry.h"
#include "faulty/work.h"

/* The last driver that was wrapped: error_text has no instance to ask. */
static const hxa_driver *wrapped;

/* ---- options ---------------------------------------------------------------------------------------------------------- */

typedef struct settings {
    uint64_t driver, control, seed;
    int seeded;
    hxa_option inner[64];
    size_t n;
} settings;

static int number(const hxa_option *option, uint64_t *value, char *error, size_t error_len) {
    char *end;
    errno = 0;
    *value = strtoull(option->value, &end, 0);
    if (errno == 0 && end != option->value && *end == '\0' && option->value[0] != '-') return 0;
    snprintf(error, error_len, "faulty: %s=%s is not a whole number", option->key, option->value);
    return -HXA_E_INVALID;
}

static int parse(const hxa_option *options, size_t n, settings *out, char *error, size_t error_len) {
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < n; i++) {
        const hxa_option *option = &options[i];
        int status = 0;
        if (strcmp(option->key, "driver") == 0) status = number(option, &out->driver, error, error_len);
        else if (strcmp(option->key, "control") == 0) status = number(option, &out->control, error, error_len);
        else if (strcmp(option->key, "seed") == 0) {
            status = number(option, &out->seed, error, error_len);
            out->seeded = 1;
        } else if (strncmp(option->key, "inner.", 6) == 0 && out->n < sizeof out->inner / sizeof *out->inner)
            out->inner[out->n++] = (hxa_option){option->key + 6, option->value};
        else {
            snprintf(error, error_len, "faulty: no option %s; there are driver control seed inner.*", option->key);
            status = -HXA_E_INVALID;
        }
        if (status != 0) return status;
    }
    if (out->driver == 0) {
        snprintf(error, error_len, "faulty: it wraps another driver; use hixl_async.testing.faulty(\"shm\", plan)");
        return -HXA_E_INVALID;
    }
    const hxa_driver *table = (const hxa_driver *)(uintptr_t)out->driver;
    if (table->abi != HXA_DRIVER_ABI || table->size < HXA_DRIVER_MIN_SIZE) {
        snprintf(error, error_len, "faulty: the wrapped driver was built for another driver interface");
        return -HXA_E_INVALID;
    }
    const faulty_block *block = (const faulty_block *)(uintptr_t)out->control;
    if (block != NULL && block->version != FAULTY_BLOCK) {
        snprintf(error, error_len, "faulty: the control block has layout %u, this driver knows %u", block->version, FAULTY_BLOCK);
        return -HXA_E_INVALID;
    }
    return 0;
}

/* ---- life ------------------------------------------------------------------------------------------------------------- */

static void instance_free(hxa_instance *self) {
    faulty_timer_free(&self->timer);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

static int faulty_open(const hxa_option *options, size_t n, const hxa_sink *sink, hxa_instance **made, char *error, size_t error_len) {
    settings set;
    int status = parse(options, n, &set, error, error_len);
    if (status != 0) return status;
    hxa_instance *self = (hxa_instance *)calloc(1, sizeof *self);
    if (self == NULL) {
        snprintf(error, error_len, "faulty: out of memory");
        return -HXA_E_NOMEM;
    }
    const hxa_driver *table = (const hxa_driver *)(uintptr_t)set.driver;
    memcpy(&self->wrapped, table, table->size < sizeof *table ? table->size : sizeof *table);
    self->table = &self->wrapped;
    faulty_ring_init(&self->calls);
    self->outer = *sink;
    self->sink = (hxa_sink){.ctx = self, .post = faulty_post, .event = faulty_event};
    self->own_block.version = FAULTY_BLOCK;
    self->block = set.control != 0 ? (faulty_block *)(uintptr_t)set.control : &self->own_block;
    self->seed = set.seeded ? set.seed : self->block->seed;
    self->loop = pthread_self();
    pthread_mutex_init(&self->lock, NULL);
    faulty_timer_init(&self->timer, &self->lock);
    status = self->table->open(set.inner, set.n, &self->sink, &self->inner, error, error_len);
    if (status != 0) {
        instance_free(self);
        return status;
    }
    __atomic_store_n(&wrapped, table, __ATOMIC_RELEASE);
    faulty_registry_add(self, faulty_run_command);
    *made = self;
    return 0;
}

static void faulty_close(hxa_instance *self) {
    faulty_registry_remove(self);
    faulty_timer_stop(&self->timer);
    faulty_operation_free_dead(self);
    self->table->close(self->inner);
    faulty_operation_free_dead(self);
    instance_free(self);
}

static void faulty_after_fork(hxa_instance *self) {
    faulty_registry_forked(self);
    for (hxa_link *link = self->links; link != NULL; link = link->next) {
        close(link->doorbell);
        close(link->set);
    }
    if (self->table->after_fork != NULL) self->table->after_fork(self->inner);
}

static void faulty_limits(hxa_instance *self, hxa_limits *out) {
    memset(out, 0, sizeof *out);
    self->table->limits(self->inner, out);
    out->caps = (out->caps ? out->caps : self->table->caps) | HXA_CAP_CANCEL;
}

static void faulty_stats(hxa_instance *self, hxa_stats *out) {
    faulty_operation_free_dead(self);
    self->table->stats(self->inner, out);
    out->threads += self->timer.running;
}

static const char *faulty_error_text(int32_t status, int32_t native) {
    if (status == HXA_E_BUSY && faulty_refusal != NULL) return faulty_refusal;
    const hxa_driver *table = __atomic_load_n(&wrapped, __ATOMIC_ACQUIRE);
    return table != NULL && table->error_text != NULL ? table->error_text(status, native) : "injected by the fault plan";
}

static const char *faulty_about(hxa_instance *self) {
    return self->table->about != NULL ? self->table->about(self->inner) : NULL;
}

/* ---- memory ----------------------------------------------------------------------------------------------------------- */

static hxa_mem *mem_new(hxa_instance *self) {
    hxa_mem *mem = (hxa_mem *)calloc(1, sizeof *mem);
    if (mem != NULL) mem->self = self;
    return mem;
}

static int mem_made(hxa_mem *mem, int answer, hxa_mem **made) {
    if (answer < 0) free(mem);
    else *made = mem;
    return answer;
}

static int faulty_mem_alloc(hxa_instance *self, uint64_t size, uint32_t rights, hxa_mem **made, void **address) {
    hxa_mem *mem = mem_new(self);
    if (mem == NULL) return -HXA_E_NOMEM;
    return mem_made(mem, self->table->mem_alloc(self->inner, size, rights, &mem->inner, address), made);
}

static int faulty_mem_register(hxa_instance *self, void *address, uint64_t size, uint32_t kind, uint32_t rights, hxa_mem **made) {
    hxa_mem *mem = mem_new(self);
    if (mem == NULL) return -HXA_E_NOMEM;
    return mem_made(mem, self->table->mem_register(self->inner, address, size, kind, rights, &mem->inner), made);
}

static int faulty_mem_export(hxa_mem *mem, uint32_t rights, hxa_metadata *metadata) {
    return mem->self->table->mem_export(mem->inner, rights, metadata);
}

static int faulty_mem_import(hxa_link *link, const hxa_metadata *metadata, uint64_t size, uint32_t rights, hxa_mem **made, hxa_op *op) {
    hxa_instance *self = link->self;
    hxa_mem *mem = mem_new(self);
    faulty_operation *call = mem != NULL ? faulty_call_forward(link, op) : NULL;
    if (call == NULL) {
        for (uint32_t i = 0; i < metadata->nfds && i < HXA_METADATA_FDS; i++) close(metadata->fds[i]);
        free(mem);
        return -HXA_E_NOMEM;
    }
    const int answer = self->table->mem_import(link->inner, metadata, size, rights, &mem->inner, &call->op);
    if (answer < 0) op->native = call->op.native;
    if (answer != HXA_PENDING) faulty_operation_free(call);
    return mem_made(mem, answer, made);
}

/* No rule applies to the bytes that a device copies by itself.  The signal that follows its copy is an operation like others. */
static int faulty_mem_borrow(hxa_link *link, hxa_mem *mem, void **address) {
    const hxa_driver *table = link->self->table;
    return table->mem_borrow != NULL ? table->mem_borrow(link->inner, mem->inner, address) : -HXA_E_UNSUPPORTED;
}

static void faulty_mem_return(hxa_link *link, hxa_mem *mem) { link->self->table->mem_return(link->inner, mem->inner); }

static void faulty_mem_release(hxa_mem *mem) {
    mem->self->table->mem_release(mem->inner);
    free(mem);
}

/* ---- the table -------------------------------------------------------------------------------------------------------- */

static const hxa_driver faulty_driver = {
    .abi = HXA_DRIVER_ABI,
    .size = sizeof(hxa_driver),
    .name = "faulty",
    .caps = HXA_CAP_CANCEL,            /* limits adds those of the wrapped driver */
    .open = faulty_open,
    .close = faulty_close,
    .after_fork = faulty_after_fork,
    .limits = faulty_limits,
    .stats = faulty_stats,
    .error_text = faulty_error_text,
    .mem_alloc = faulty_mem_alloc,
    .mem_register = faulty_mem_register,
    .mem_export = faulty_mem_export,
    .mem_import = faulty_mem_import,
    .mem_release = faulty_mem_release,
    .link_new = faulty_link_new,
    .link_connect = faulty_link_connect,
    .link_fd = faulty_link_fd,
    .link_stop = faulty_link_stop,
    .link_fence = faulty_link_fence,
    .link_free = faulty_link_free,
    .submit = faulty_submit,
    .cancel = faulty_cancel,
    .progress = faulty_progress,
    .poll = faulty_poll,
    .start = faulty_start,
    .shutdown = faulty_shutdown,
    .mem_ready = faulty_mem_ready,
    .mem_retire = faulty_mem_retire,
    .message = faulty_message_receive,
    .abandon = faulty_abandon,
    .link_pace = faulty_link_pace,
    .about = faulty_about,
    .mem_borrow = faulty_mem_borrow,
    .mem_return = faulty_mem_return,
    .waits = faulty_waits,
};

HXA_DRIVER_MODULE(_faulty, faulty_driver)
