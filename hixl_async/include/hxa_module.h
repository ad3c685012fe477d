/* HXA_DRIVER_MODULE(_name, table) makes an importable module that exports the table as the capsule DRIVER. */
#ifndef HXA_MODULE_H
#define HXA_MODULE_H

#include <Python.h>

#include "hxa_driver.h"

#ifdef Py_GIL_DISABLED
#define HXA_MODULE_GIL_SLOT {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#else
#define HXA_MODULE_GIL_SLOT
#endif

#define HXA_DRIVER_MODULE(module, table)                                                                     \
    static int hxa_module_exec(PyObject *self) {                                                             \
        PyObject *capsule = PyCapsule_New((void *)&(table), HXA_DRIVER_CAPSULE, NULL);                        \
        if (capsule == NULL) return -1;                                                                      \
        int status = PyModule_AddObjectRef(self, "DRIVER", capsule);                                         \
        Py_DECREF(capsule);                                                                                  \
        return status;                                                                                       \
    }                                                                                                        \
    static PyModuleDef_Slot hxa_module_slots[] = {                                                           \
        {Py_mod_exec, (void *)hxa_module_exec}, HXA_MODULE_GIL_SLOT{0, NULL}};                               \
    static struct PyModuleDef hxa_module_def = {                                                             \
        PyModuleDef_HEAD_INIT, #module, "A hixl_async driver.", 0, NULL, hxa_module_slots, NULL, NULL, NULL}; \
    PyMODINIT_FUNC PyInit_##module(void);                                                                    \
    PyMODINIT_FUNC PyInit_##module(void) { return PyModuleDef_Init(&hxa_module_def); }

#endif /* HXA_MODULE_H */
