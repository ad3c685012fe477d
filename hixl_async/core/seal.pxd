# Types that only the core can instantiate.
from cpython.object cimport PyObject, PyTypeObject

cdef extern from *:
    """
    /* Cython calls the constructor of a type of its own module directly.  From Python, and from the core's other modules, a
     * type is made through its slot, which refuses from here on, so that no method ever sees an uninitialized object. */
    static void hxa_seal(PyObject *type, newfunc refuse) {
        ((PyTypeObject *)type)->tp_new = refuse;
        ((PyTypeObject *)type)->tp_vectorcall = NULL;  /* it would bypass the slot */
        PyType_Modified((PyTypeObject *)type);
    }
    """
    ctypedef object (*newfunc)(PyTypeObject *, PyObject *, PyObject *)
    void hxa_seal(object, newfunc)
