from gda.storage.orbax import open_orbax as open_orbax
from gda.storage.safetensors import SafetensorsFiles as SafetensorsFiles
from gda.storage.safetensors import SafetensorsTensor as SafetensorsTensor
from gda.storage.safetensors import open_safetensors as open_safetensors
from gda.storage.targets import SliceTarget as SliceTarget
from gda.trees.files.save_safetensors import save_safetensors as save_safetensors
