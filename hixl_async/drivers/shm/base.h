/* The system's headers and the driver interface, as all files of this driver want them. */
#ifndef SHM_BASE_H
#define SHM_BASE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#include "hxa_driver.h"
#include "hxa_retry.h"

#ifndef SHM_INTERNAL
#define SHM_INTERNAL __attribute__((visibility("hidden")))
#endif

enum {
    SHM_LINE = 128,                    /* two cache lines, because neighbours are fetched in pairs */
    SHM_PAGE = 4096,                   /* the header of a half; its ring starts behind it */
    SHM_VERSION = 2                    /* of all that two drivers tell each other */
};

/* The refusal for an errno. */
static inline int shm_refusal_of(int error) {
    switch (error) {
    case ENOMEM: case ENOSPC: case EMFILE: case ENFILE: case EFBIG: case EDQUOT: return HXA_REFUSAL(HXA_E_NOMEM, error);
    case EPERM: case EACCES: return -HXA_E_RIGHTS;
    default: return HXA_REFUSAL(HXA_E_SYSTEM, error);
    }
}

/* The same for a call that has an op, in which the errno is stored. */
static inline int shm_refuse(hxa_op *op, int refusal) {
    op->native = hxa_refusal_native(refusal);
    return -hxa_refusal_status(refusal);
}

#endif /* SHM_BASE_H */
