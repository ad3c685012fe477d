#include "about.hpp"

#include <fstream>
#include <new>
#include <string>

#include "instance.hpp"

namespace hx {

namespace {

// From `${root}/share/info/hixl/version.info` of the toolkit that has the library; the library itself has no version.
std::string version_of(const std::string &library) {
    std::string root = library;
    for (int i = 0; i < 3; i++) {  // the file, lib64, and where there is one the architecture
        const size_t slash = root.rfind('/');
        if (slash == std::string::npos) break;
        root.resize(slash);
        std::ifstream info(root + "/share/info/hixl/version.info");
        std::string line;
        while (std::getline(info, line))
            if (line.compare(0, 8, "Version=") == 0) return line.substr(8);
    }
    return "unknown (no share/info/hixl/version.info beside it)";
}

const char *yes(bool there) { return there ? "yes" : "no"; }

std::string capability(const Library &library, abi::FeatureType feature) {
    int32_t value = 0;
    if (library.capability == nullptr) return "unknown (no GetCapability)";
    return yes(library.capability(feature, value) == abi::SUCCESS && value != 0);
}

std::string backend_of(const hxa_instance &self) {
    if (self.started != 0) return std::string(word_of(self.backend)) + ", by " + self.backend_by;
    if (self.options.backend == Backend::AUTO) return "cs on an Ascend 950, else comm";
    return std::string(word_of(self.options.backend)) + ", by " + self.options.chosen_by;
}

}  // namespace

const char *instance_about(hxa_instance *self) {
    static thread_local std::string lines;
    const Library &library = self->library;
    try {
        lines = "library: " + library.path;
        lines += "\nversion: " + version_of(library.path);
        lines += "\nback-end: " + backend_of(*self);
        lines += std::string("\nAscendCL: ") + yes(library.acl.there());
        lines += std::string("\nbatch query: ") + yes(library.transfer_statuses != nullptr)
                 + (self->started == 0 ? ""
                    : self->batch      ? ", in use"
                                       : ", not on this back-end");
        lines += std::string("\nasynchronous connect: ") + yes(library.connect_async != nullptr);
        lines += "\nAutoConnect: " + capability(library, abi::AUTO_CONNECT);
        lines += "\nclient-server links: " + capability(library, abi::CLIENT_SERVER_COMM);
        if (self->started != 0) lines += "\nlistens at: " + self->id;
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
    return lines.c_str();
}

}  // namespace hx
